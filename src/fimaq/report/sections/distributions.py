"""Distributions of weights and activations with the ranges that were chosen."""

from typing import Any

from fimaq.report.charts import small_histogram
from fimaq.report.distributions import Distribution
from fimaq.report.markup import Html, breakable, details, tag
from fimaq.report.material import Material
from fimaq.report.reading import significant
from fimaq.report.sections.layers import not_shown
from fimaq.report.sensitivity import AT_ONCE, LayerNoise

OPEN_LAYERS = 4


def distributions_section(material: Material) -> list[Any]:
    found = material.sensitivity
    if found is None:
        return [not_shown(material)]
    worst = sorted(found.layers, key=lambda layer: layer.own.decibels)[:OPEN_LAYERS]
    units = list(dict.fromkeys(layer.unit for layer in found.layers))
    return [
        tag(
            "p",
            f"Values in full precision, activations over the first {min(AT_ONCE, found.images)} images. Heights "
            "are logarithmic, so that single outliers are seen. The light field and the bracket below it are the "
            "chosen range; what lies outside is clipped. Weights have a range per channel: the median is drawn.",
        ),
        tag("h3", f"The {len(worst)} layers with the least signal-to-noise ratio of their own"),
        tag("div", [_panels(layer) for layer in worst], class_="multiples"),
        tag("h3", "All layers, by unit"),
        [
            details(
                unit or "whole model",
                tag("div", [_panels(layer) for layer in found.layers if layer.unit == unit], class_="multiples"),
            )
            for unit in units
        ],
    ]


def _panels(layer: LayerNoise) -> list[Html]:
    return [_panel(layer.name, found) for found in layer.distributions]


def _panel(name: str, found: Distribution) -> Html:
    several = f", median of {found.ranges}" if found.ranges > 1 else ""
    chosen = f"range {significant(found.chosen[0])} to {significant(found.chosen[1])}{several}"
    text = f"values {significant(found.low)} to {significant(found.high)}; {100 * found.outside:.2g} % clipped"
    picture = small_histogram(
        found.counts, found.low, found.high, found.chosen, f"Histogram of {name}, {found.what}: {chosen}; {text}"
    )
    caption = [
        tag("b", breakable(name)),
        tag("br"),
        f"{found.what}, {found.bits} bits",
        tag("br"),
        chosen,
        tag("br"),
        text,
    ]
    return tag("figure", picture, tag("figcaption", caption))
