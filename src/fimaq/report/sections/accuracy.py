"""How accurate is it: full precision beside quantized."""

from typing import Any

from fimaq.report.charts import interval_chart, legend
from fimaq.report.intervals import around, paired_difference, wilson
from fimaq.report.markup import Html, table, tag
from fimaq.report.material import Material
from fimaq.report.reading import mapping, number, shown, significant, whole

NAMES = {"full_precision": "full precision", "quantized": "quantized"}
AVERAGE_PRECISIONS = ("AP", "AP50", "AP75", "APs", "APm", "APl")


def accuracy_section(material: Material) -> list[Any]:
    accuracy = mapping(material.metrics.get("accuracy"))
    if material.task == "detection":
        return [*_average_precision(material, accuracy), *_fidelity(material)]
    if not accuracy:
        return [
            tag(
                "p",
                tag("strong", "The accuracy of this run is not known: no labelled images were given. "),
                "What follows compares the quantized model with the full-precision one on the images it was "
                "calibrated with, which flatters it. To measure accuracy, run ",
                tag("code", f"fimaq evaluate {material.path} --data DIR"),
                ", or give this command ",
                tag("code", "--val DIR"),
                ".",
            ),
            *_fidelity(material),
        ]
    return [*_top(accuracy), *_closeness(accuracy), *_fidelity(material)]


def _top(accuracy: dict[str, Any]) -> list[Any]:
    """Top-1 and top-5 with Wilson's intervals, and the difference in top-1, paired where it can be."""
    count = whole(accuracy.get("images")) or 0
    rows, points = [], []
    for key, title in (("top1", "top-1"), ("top5", "top-5")):
        for model, name in NAMES.items():
            percent = number(mapping(accuracy.get(model)).get(key))
            if percent is None or not 0 <= percent <= 100 or count < 1:
                continue
            low, high = (100 * end for end in wilson(round(percent * count / 100), count))
            rows.append((f"{title}, {name}", f"{percent:.2f} %", f"{low:.1f} to {high:.1f} %"))
            points.append((f"{title}, {name}", model == "quantized", percent, (low, high)))
    if not rows:
        return [tag("p", "metrics.json holds an accuracy without images or shares; nothing can be shown of it.")]
    parts: list[Any] = [
        tag("p", f"Measured on {count:,} labelled images", _unreadable(accuracy), _classes(accuracy), "."),
        interval_chart(
            "accuracy",
            "Top-1 and top-5 in percent",
            points,
            [
                legend("full precision", "quantized"),
                " in percent, with 95 % confidence intervals (Wilson). Both models saw the same images, so the "
                "difference is known better than the two intervals suggest.",
            ],
        ),
    ]
    if "full_precision" not in accuracy:
        parts.append(tag("p", "The full-precision weights were not at hand when this was measured."))
        return parts
    return [*parts, tag("p", _difference(accuracy, count))]


def _difference(accuracy: dict[str, Any], count: int) -> list[Any]:
    full, quantized = (number(mapping(accuracy.get(model)).get("top1")) for model in NAMES)
    if full is None or quantized is None:
        return ["One of the two models has no top-1."]
    lost = quantized - full
    text = [tag("strong", f"Top-1 changes by {shown(lost, 2)} points"), " by quantization"]
    right = mapping(accuracy.get("top1_right"))
    alone = [whole(right.get(key)) for key in ("only_full_precision", "only_quantized")]
    if alone[0] is None or alone[1] is None or sum(a or 0 for a in alone) > count:
        return [
            *text,
            "; which images each model got right was not recorded: measure again for a paired interval.",
        ]
    low, high = (100 * end for end in paired_difference(alone[0], alone[1], count))
    clear = "Zero is inside: the difference may be chance." if low <= 0 <= high else "Zero is outside."
    return [
        *text,
        f"; 95 % interval {shown(low)} to {shown(high)} points, paired: {alone[0]} images are right in full "
        f"precision alone, {alone[1]} in the quantized model alone. {clear}",
    ]


def _closeness(accuracy: dict[str, Any]) -> list[Any]:
    """Agreement and KL divergence of the two models on the labelled images."""
    count, agreement = whole(accuracy.get("images")) or 0, number(accuracy.get("agreement"))
    if agreement is None or count < 1 or not 0 <= agreement <= 100:
        return []
    low, high = (100 * end for end in wilson(round(agreement * count / 100), count))
    kl, error = number(accuracy.get("kl_divergence")), number(accuracy.get("kl_standard_error"))
    rows = [("same top-1 answer", f"{agreement:.2f} %", f"{low:.1f} to {high:.1f} %")]
    if kl is not None:
        ends = "–" if error is None else " to ".join(significant(end) for end in around(kl, error))
        rows.append(("mean KL divergence", significant(kl), ends))
    return [
        table(("the two models", "", "95 % interval"), rows, "Quantized against full precision, labelled images")
    ]


def _fidelity(material: Material) -> list[Any]:
    fidelity = mapping(material.metrics.get("fidelity"))
    count = whole(mapping(material.config.get("data")).get("images")) or 0
    agreement, kl = number(fidelity.get("agreement")), number(fidelity.get("kl_divergence"))
    rows = []
    if agreement is not None and 0 <= agreement <= 100:
        ends = "–"
        if count and material.task != "detection":
            low, high = (100 * end for end in wilson(round(agreement * count / 100), count))
            ends = f"{low:.1f} to {high:.1f} %"
        what = "same decision, object or not" if material.task == "detection" else "same top-1 answer"
        rows.append((what, f"{agreement:.2f} %", ends))
    if kl is not None:
        rows.append(("mean KL divergence", significant(kl), "–"))
    if not rows:
        return [tag("p", "metrics.json says nothing about the calibration images.")]
    title = f"Quantized against full precision, {count:,} calibration images, which it was fitted to (no labels)"
    return [table(("the two models", "", "95 % interval"), rows, title)]


def _average_precision(material: Material, accuracy: dict[str, Any]) -> list[Any]:
    if not accuracy:
        return [
            tag(
                "p",
                tag("strong", "The average precision of this detector was not measured. "),
                "To measure it, run ",
                tag("code", f"fimaq evaluate {material.path} --data COCO_DIR"),
                ".",
            )
        ]
    rows = [
        (
            f"{name}, {label}",
            *(shown(mapping(mapping(accuracy[model]).get(kind)).get(a), 1) for a in AVERAGE_PRECISIONS),
        )
        for model, name in NAMES.items()
        if model in accuracy
        for kind, label in (("bbox", "boxes"), ("segm", "masks"))
    ]
    count = whole(accuracy.get("images")) or 0
    caption = f"COCO average precision in percent, {count:,} images{_unreadable(accuracy)}"
    return [
        table(("", *AVERAGE_PRECISIONS), rows, caption),
        tag("p", "No confidence intervals are given: average precision is not a share of independent images."),
    ]


def _unreadable(accuracy: dict[str, Any]) -> str:
    left_out = whole(accuracy.get("unreadable"))
    return f" ({left_out} unreadable ones left out)" if left_out else ""


def _classes(accuracy: dict[str, Any]) -> str:
    source = accuracy.get("classes_by")
    return f"; classes by {source}" if isinstance(source, str) else ""


def headline(material: Material) -> Html:
    """The answer in one sentence, for the top of the page."""
    accuracy, parts = mapping(material.metrics.get("accuracy")), []
    full, quantized = (number(mapping(accuracy.get(model)).get("top1")) for model in NAMES)
    if quantized is not None:
        beside = "" if full is None else f" (full precision {full:.1f} %)"
        parts.append(f"top-1 {quantized:.1f} %{beside}")
    else:
        agreement = number(mapping(material.metrics.get("fidelity")).get("agreement"))
        what = "the same decision, object or not," if material.task == "detection" else "the same answer"
        if agreement is not None:
            parts.append(f"{what} as full precision on {agreement:.1f} % of the calibration images")
    size = mapping(material.metrics.get("size"))
    before, after = number(size.get("full_precision_bytes")), number(size.get("quantized_bytes"))
    if before and after:
        parts.append(f"{after / 1e6:.1f} MB instead of {before / 1e6:.1f}")
    said = "; ".join(parts)
    said = f"{said[:1].upper()}{said[1:]}.".replace(" %", "\u00a0%").replace(" MB", "\u00a0MB")
    return tag("p", said, class_="headline")
