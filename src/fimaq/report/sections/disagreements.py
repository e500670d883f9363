"""A few images on which the two models disagree."""

from typing import Any

from fimaq.report.disagreements import Disagreement
from fimaq.report.intervals import wilson
from fimaq.report.markup import Html, tag
from fimaq.report.material import Material
from fimaq.report.sections.layers import not_shown


def disagreements_section(material: Material) -> list[Any]:
    found = material.disagreements
    if found is None:
        return [not_shown(material)]
    low, high = (100 * end for end in wilson(found.count, max(1, found.images)))
    share = f"{100 * found.count / max(1, found.images):.1f} %, 95 % interval {low:.1f} to {high:.1f} %"
    said = (
        f"Of {found.images} images ({material.disagreements_on}), the two models answer differently on "
        f"{found.count or 'none'} ({share})."
    )
    worst = found.worst
    if not worst:
        return [tag("p", said)]
    named = "" if material.class_names else " Classes are given by number, since their names are not known."
    return [
        tag("p", said, f" Shown are {len(worst)}, those first that full precision was surest of.", named),
        tag("div", [_card(item, material.class_names) for item in worst], class_="cards"),
    ]


def _card(item: Disagreement, names: dict[int, str]) -> Html:
    def answer(index: int, probability: float) -> list[Any]:
        mark = "" if item.target is None else "\u00a0✓" if index == item.target else "\u00a0✗"
        return [f"{_name(index, names)} {100 * probability:.0f}\u00a0%{mark}"]

    lines: list[Any] = [
        tag("dt", "full precision"),
        tag("dd", answer(*item.full)),
        tag("dt", "quantized"),
        tag("dd", answer(*item.quantized)),
    ]
    if item.target is not None and item.target not in (item.full[0], item.quantized[0]):
        lines += [tag("dt", "true class"), tag("dd", _name(item.target, names))]
    one, two = (_name(answered[0], names) for answered in (item.full, item.quantized))
    alt = f"image that full precision takes for {one}, the quantized model for {two}"
    return tag("figure", tag("img", src=item.picture, alt=alt), tag("figcaption", tag("dl", lines)))


def _name(index: int, names: dict[int, str]) -> str:
    return names[index].split(",")[0] if index in names else f"class {index}"
