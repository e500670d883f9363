"""What the optimisation did: losses, roundings and scales, and the Fisher pictures where there are any."""

import base64
import io
import math
from pathlib import Path
from typing import Any

from PIL import Image

from fimaq.artifact.files import read_json
from fimaq.data.image import UnreadableImage, load_image
from fimaq.errors import InputError
from fimaq.report.charts import Bar, bar_chart, small_curve
from fimaq.report.markup import Html, details, table, tag
from fimaq.report.material import Material
from fimaq.report.reading import listed, mapping, number, shown, significant, whole

WIDEST_PICTURE = 1400


def optimisation_section(material: Material) -> list[Any]:
    units = [mapping(unit) for unit in listed(material.metrics.get("units"))]
    if not units:
        return [tag("p", "metrics.json holds no units."), *_fisher(material)]
    return [*_losses(units, material), *_roundings(units), *_scales(units), *_fisher(material)]


def _losses(units: list[dict[str, Any]], material: Material) -> list[Any]:
    curves = [(str(unit.get("unit", "?")), _points(unit), unit) for unit in units]
    drawn = [(name, points, unit) for name, points, unit in curves if len(points) > 1]
    if not drawn:
        method = mapping(material.config.get("settings")).get("method")
        return [tag("p", f"There are no loss curves: the method {method} or so few iterations leave none.")]
    panels = []
    for name, points, unit in drawn:
        last, best = points[-1][1], min(y for _, y in points)
        text = f"{significant(points[0][1])} → {significant(last)}, smallest {significant(best)}"
        warning = None if unit.get("finite", True) else tag("strong", " not finite")
        panels.append(
            tag(
                "figure",
                small_curve(points, f"Loss of {name} over {int(points[-1][0])} iterations: {text}"),
                tag("figcaption", tag("b", name), warning, tag("br"), text),
            )
        )
    rows = [
        (
            name,
            *(significant(y) for y in (points[0][1], min(y for _, y in points), points[-1][1])),
            shown(unit.get("seconds"), 1),
        )
        for name, points, unit in drawn
    ]
    return [
        tag("h3", "Loss of each unit"),
        tag(
            "p",
            "The line at the foot of each curve is zero. A loss is relative to its value when the Fisher "
            "approximation was last refreshed, so it jumps up at a refresh: compare within a stretch, not across.",
        ),
        tag("div", panels, class_="multiples"),
        details(
            "The numbers",
            table(
                ("unit", "first", "smallest", "last", "seconds"),
                rows,
                "Losses at the iterations that were recorded",
            ),
        ),
    ]


def _points(unit: dict[str, Any]) -> list[tuple[float, float]]:
    pairs = [listed(pair) for pair in listed(unit.get("losses"))]
    found = [(number(pair[0]), number(pair[1])) for pair in pairs if len(pair) == 2]
    return [(x, y) for x, y in found if x is not None and y is not None and math.isfinite(y)]


def _roundings(units: list[dict[str, Any]]) -> list[Any]:
    bars = []
    for unit in units:
        flipped, weights = whole(unit.get("flipped")), whole(unit.get("weights"))
        if flipped is not None and weights:
            share = 100 * flipped / weights
            bars.append(Bar(str(unit.get("unit", "?")), share, f"{share:.1f} %"))
    if not bars:
        return []
    return [
        tag("h3", "Weights not rounded to the nearest value"),
        bar_chart(
            "flips",
            "Share of weights that are not rounded to nearest",
            bars,
            ("unit", "share"),
            "Share of a unit's weights that reconstruction rounded the other way. At 0 % nothing would have "
            "been learned.",
        ),
    ]


def _scales(units: list[dict[str, Any]]) -> list[Any]:
    rows, bars = [], []
    for unit in units:
        changes = {
            name: found
            for name, v in mapping(unit.get("scale_changes")).items()
            if (found := number(v)) is not None
        }
        if not changes:
            continue
        rows += [
            (f"{unit.get('unit', '?')}.{name}", f"{100 * v:+.2f} %".replace("-", "−"))
            for name, v in changes.items()
        ]
        mean = 100 * sum(abs(v) for v in changes.values()) / len(changes)
        bars.append(Bar(str(unit.get("unit", "?")), mean, f"{mean:.2f} %"))
    if not bars:
        return [tag("p", "How far activation scales moved was not recorded by the version that made this run.")]
    return [
        tag("h3", "Activation scales learned"),
        bar_chart(
            "scales",
            "Mean absolute change of a unit's activation scales, from range search to the end",
            bars,
            ("unit", "mean change"),
            "How far, on average, learning moved a unit's activation scales from what the range search had found.",
        ),
        details("Every scale", table(("quantizer", "change"), rows, "Relative changes of activation scales")),
    ]


def _fisher(material: Material) -> list[Any]:
    parts: list[Any] = []
    for folder in material.fisher:
        for name, text in (("fisher.png", "Fisher matrix of one token"), ("rank.png", "Error by rank")):
            parts += _picture(folder, name, text)
    return [tag("h3", "Fisher matrices"), *parts] if parts else []


def _picture(folder: Path, name: str, text: str) -> list[Html]:
    path = folder / name
    if not path.is_file():
        return []
    try:
        image = load_image(path)
        about = mapping(read_json(folder / "fisher.json"))
    except (UnreadableImage, InputError) as error:
        return [tag("p", f"{path} is not shown: {error}")]
    image.thumbnail((WIDEST_PICTURE, WIDEST_PICTURE))
    buffer = io.BytesIO()
    image.quantize(128, method=Image.Quantize.FASTOCTREE).save(buffer, "PNG", optimize=True)
    uri = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
    where = f"{text}: {about.get('unit', folder.name)}, token {about.get('token', '?')}"
    picture = tag("img", src=uri, alt=where, width=image.width, height=image.height)
    return [tag("figure", picture, tag("figcaption", where), class_="picture", tabindex="0")]
