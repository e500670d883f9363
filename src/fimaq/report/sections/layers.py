"""Which units and layers hurt."""

import math
from typing import Any

from fimaq.report.charts import Bar, bar_chart, legend, scatter_chart
from fimaq.report.intervals import around
from fimaq.report.markup import Html, details, table, tag
from fimaq.report.material import Material
from fimaq.report.reading import mapping, significant
from fimaq.report.sensitivity import LayerNoise, Sensitivity, UnitSensitivity

EMPHASISED = 3
WORST_LAYERS = 10


def layers_section(material: Material) -> list[Any]:
    found = material.sensitivity
    if found is None:
        return [not_shown(material)]
    method = mapping(material.config.get("settings")).get("method")
    return [*_units(found, material.images_from, method), *_layers(found)]


def not_shown(material: Material) -> Html:
    return tag("p", tag("strong", "Not shown: "), material.missing or "it was not measured", ".")


def _units(found: Sensitivity, images_from: str, method: Any) -> list[Any]:
    ranked = sorted(found.units, key=lambda unit: unit.kl, reverse=True)
    worst = {unit.unit for unit in ranked[:EMPHASISED]}
    charts = tag("div", _divergences(found, worst), _output_errors(found, worst), class_="pair")
    return [_how_units_were_measured(found, images_from, method), charts, _all_units(ranked, found.images)]


def _how_units_were_measured(found: Sensitivity, images_from: str, method: Any) -> Html:
    whole = found.whole
    return tag(
        "p",
        f"One unit at a time is quantized as in the run, all others are in full precision; {found.images} "
        f"images ({images_from}). With all units quantized, the KL divergence on these images is "
        f"{significant(whole.kl)} (±{significant(1.96 * whole.kl_error, 2)}), and the answer is the same "
        f"on {whole.agreeing} of them. Single units do not add up to this",
        "."
        if method == "rtn"
        else ": each was reconstructed on the quantized outputs of those before it, and makes part of their "
        "errors good.",
    )


def _divergences(found: Sensitivity, worst: set[str]) -> Html:
    bars = [
        Bar(_named(u), u.kl, significant(u.kl, 2), around(u.kl, u.kl_error), u.unit in worst) for u in found.units
    ]
    return bar_chart(
        "unit-kl",
        "KL divergence of the model's output, one unit quantized",
        bars,
        ("unit", "KL divergence", "95 % interval"),
        f"KL divergence of the model's output with only this unit quantized, and its 95 % interval. The "
        f"{len(worst)} units that hurt most are in bold.",
    )


def _output_errors(found: Sensitivity, worst: set[str]) -> Html:
    percents = [(u, 100 * u.output.relative) for u in found.units]
    return bar_chart(
        "unit-error",
        "Error of the unit's own output, one unit quantized",
        [Bar(_named(u), percent, f"{percent:.1f} %", None, u.unit in worst) for u, percent in percents],
        ("unit", "relative error"),
        "Error of the unit's own output relative to its size, the same units in bold. A large one need "
        "not hurt: compare with the KL divergence.",
    )


def _all_units(ranked: list[UnitSensitivity], images: int) -> Html:
    rows = [
        (
            u.unit,
            significant(u.kl),
            f"±{significant(1.96 * u.kl_error, 2)}",
            f"{100 * u.output.relative:.2f} %",
            f"{u.agreeing} of {images}",
        )
        for u in ranked
    ]
    columns = ("unit", "KL divergence", "95 %", "error of its output", "same answer")
    return details("All units, those that hurt most first", table(columns, rows, "Units quantized alone"))


def _named(unit: UnitSensitivity) -> str:
    return unit.unit or "whole model"


def _layers(found: Sensitivity) -> list[Any]:
    layers = found.layers
    groups: list[tuple[str, int]] = []
    for layer in layers:
        if groups and groups[-1][0] == layer.unit:
            groups[-1] = (layer.unit, groups[-1][1] + 1)
        else:
            groups.append((layer.unit, 1))
    worst = sorted(layers, key=lambda layer: layer.own.decibels)[:WORST_LAYERS]
    head = ("layer or product", "own, dB", "in the model, dB")
    return [
        tag("h3", "Signal-to-noise ratio of each layer's output"),
        scatter_chart(
            "snr",
            "Signal-to-noise ratio in decibels of every layer and product, in the order they run",
            [
                ("own rounding", [layer.own.decibels for layer in layers]),
                ("in the quantized model", [layer.in_model.decibels for layer in layers]),
            ],
            groups,
            [
                legend(
                    "its own rounding alone, with full-precision inputs;",
                    "in the quantized model, with all errors before it.",
                ),
                " Decibels; 6 dB more halve the error. Vertical lines separate units.",
            ],
            table(head, [_row(layer) for layer in layers], "Signal-to-noise ratios in the order layers run"),
        ),
        table(
            head, [_row(layer) for layer in worst], f"The {len(worst)} layers with the least ratio of their own"
        ),
    ]


def _row(layer: LayerNoise) -> tuple[str, str, str]:
    return layer.name, decibels(layer.own.decibels), decibels(layer.in_model.decibels)


def decibels(value: float) -> str:
    return f"{value:.1f}".replace("-", "−") if math.isfinite(value) else "no error" if value > 0 else "–"
