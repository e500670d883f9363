"""Charts as SVG, drawn without any library and readable without colour: shapes and labels say the same.

Colours are Okabe and Ito's, which readers with any kind of colour vision tell apart. Each chart carries a title
and a description for those who hear the page, and the numbers behind it as a table.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fimaq.report.markup import Html, details, table, tag
from fimaq.report.reading import significant

BLUE, VERMILLION, GREY, INK = "#0072B2", "#D55E00", "#8a8a8a", "#1a1a1a"
WIDTH = 360
"""Charts are drawn for a phone's width, in its pixels, and scaled up a little on larger screens."""
LABELS, RIGHT = 122, 62
LONGEST_LABEL, LONGEST_BOLD = 18, 16


@dataclass(frozen=True)
class Bar:
    """One row of a bar chart. `interval`: drawn as a whisker. `emphasised`: stands out, with `note` saying why."""

    label: str
    value: float
    text: str
    interval: tuple[float, float] | None = None
    emphasised: bool = False


def figure(
    name: str, title: str, description: str, drawing: Any, size: tuple[float, float], caption: Any, data: Any
) -> Html:
    """A chart with its text alternative; `name` is unique on the page, `data` a table or None."""
    image = tag(
        "svg",
        tag("title", title, id=f"{name}-title"),
        tag("desc", description, id=f"{name}-desc"),
        drawing,
        viewBox=f"0 0 {size[0]:g} {size[1]:g}",
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
        class_="chart",
    )
    numbers = details("The numbers", data) if data is not None else None
    return tag("figure", image, tag("figcaption", caption), numbers)


def bar_chart(
    name: str, title: str, bars: Sequence[Bar], head: Sequence[str], caption: Any = None, data: Any = None
) -> Html:
    """Horizontal bars from zero, with their values beside them; `data`: a table in place of the bars' own."""
    bars = [bar for bar in bars if math.isfinite(bar.value)]
    most = max([bar.value for bar in bars] + [bar.interval[1] for bar in bars if bar.interval], default=0.0)
    scale = (WIDTH - LABELS - RIGHT) / most if most > 0 else 0.0
    step, parts = 20, []
    for row, bar in enumerate(bars):
        middle = row * step + step / 2 + 4
        length = max(0.0, bar.value) * scale
        fill = VERMILLION if bar.emphasised else BLUE
        label = _short(bar.label, LONGEST_BOLD if bar.emphasised else LONGEST_LABEL)
        parts += [
            _text(LABELS - 6, middle + 4, label, "end", bold=bar.emphasised, whole=bar.label),
            tag("rect", x=LABELS, y=f"{middle - 6:g}", width=f"{max(length, 1):.1f}", height=12, fill=fill),
        ]
        end = length
        if bar.interval is not None:
            low, high = (LABELS + value * scale for value in bar.interval)
            parts += _whisker(low, high, middle)
            end = max(end, bar.interval[1] * scale)
        parts.append(_text(LABELS + end + 5, middle + 4, bar.text, bold=bar.emphasised))
    axis = tag("line", x1=LABELS, x2=LABELS, y1=0, y2=len(bars) * step + 8, stroke=GREY)
    said = "; ".join(f"{bar.label} {bar.text}" for bar in bars)
    rows = [
        (bar.label, bar.text, f"{significant(bar.interval[0])} to {significant(bar.interval[1])}")
        if bar.interval
        else (bar.label, bar.text)
        for bar in bars
    ]
    size = (WIDTH, len(bars) * step + 8)
    numbers = table(head, rows, title) if data is None else data
    return figure(name, title, said, [axis, *parts], size, caption or title, numbers)


def interval_chart(
    name: str,
    title: str,
    rows: Sequence[tuple[str, bool, float, tuple[float, float]]],
    caption: Any = None,
) -> Html:
    """Shares in percent with their intervals: (label, quantized or not, value, interval); disc or diamond."""
    low = max(0.0, min(row[3][0] for row in rows) - 2)
    high = min(100.0, max(row[3][1] for row in rows) + 2)
    left, right, step = 132, 44, 24
    scale = (WIDTH - left - right) / (high - low)
    parts: list[Html] = []
    for value in ticks(low, high, 4):
        x = left + (value - low) * scale
        parts.append(tag("line", x1=f"{x:.1f}", x2=f"{x:.1f}", y1=0, y2=len(rows) * step + 4, stroke="#ddd"))
        parts.append(_text(x, len(rows) * step + 18, f"{value:g}", "middle"))
    for index, (label, is_quantized, value, interval) in enumerate(rows):
        y = index * step + step / 2 + 2
        ends = [left + (end - low) * scale for end in interval]
        parts.append(_text(left - 8, y + 4, label, "end"))
        parts += _whisker(ends[0], ends[1], y)
        parts.append(marker(left + (value - low) * scale, y, is_quantized, 5))
        parts.append(_text(WIDTH - 2, y + 4, f"{value:.1f}", "end", bold=True))
    said = "; ".join(f"{label} {value:.2f} %, {a:.2f} to {b:.2f}" for label, _, value, (a, b) in rows)
    data = [(label, f"{value:.2f} %", f"{a:.2f} to {b:.2f}") for label, _, value, (a, b) in rows]
    return figure(
        name,
        title,
        said,
        parts,
        (WIDTH, len(rows) * step + 24),
        caption or title,
        table(("", "percent", "95 % interval"), data, title),
    )


def scatter_chart(
    name: str,
    title: str,
    series: Sequence[tuple[str, Sequence[float]]],
    groups: Sequence[tuple[str, int]],
    caption: Any,
    data: Any,
) -> Html:
    """Two values in decibels for each thing in a row, disc and diamond; `groups`: (name, how many) neighbours."""
    finite = [value for _, values in series for value in values if math.isfinite(value)]
    low, high = math.floor(min([0.0, *finite])), math.ceil(max([1.0, *finite]))
    left, top, bottom, height = 44, 8, 172, 246
    count = max(1, len(series[0][1]))
    across, up = (WIDTH - left - 8) / count, (bottom - top) / (high - low)
    parts: list[Html] = []
    for value in ticks(low, high, 5):
        y = bottom - (value - low) * up
        parts.append(tag("line", x1=left, x2=WIDTH - 8, y1=f"{y:.1f}", y2=f"{y:.1f}", stroke="#ddd"))
        parts.append(_text(left - 5, y + 4, f"{value:g} dB".replace("-", "−"), "end"))
    position, every = 0, max(1, math.ceil(len(groups) / 20))
    for index, (label, size) in enumerate(groups):
        x = left + (position + size / 2) * across
        edge = left + position * across
        parts.append(tag("line", x1=f"{edge:.1f}", x2=f"{edge:.1f}", y1=top, y2=bottom + 4, stroke="#eee"))
        if index % every == 0:
            turned = f"rotate(-55 {x + 3:.1f} {bottom + 12})"
            parts.append(_text(x + 3, bottom + 12, _short(label, 11), "end", size=10, transform=turned))
        position += size
    for which, (_, values) in enumerate(series):
        for index, value in enumerate(values):
            if math.isfinite(value):
                x, y = left + (index + 0.5) * across, bottom - (value - low) * up
                parts.append(marker(x, y, which == 1, min(3.5, max(1.8, across))))
    said = " ".join(f"{label}: {_summary(values)}." for label, values in series)
    return figure(name, title, said, parts, (WIDTH, height), caption, data)


def small_curve(points: Sequence[tuple[float, float]], label: str) -> Html:
    """A line over time without axes, from zero up; the caption below it gives the numbers."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    across, up = 156 / max(1e-30, max(xs) - min(xs)), 66 / max(1e-30, max(ys))
    line = " ".join(f"{2 + (x - min(xs)) * across:.1f},{70 - max(0, y) * up:.1f}" for x, y in points)
    parts = [
        tag("line", x1=2, x2=158, y1=70, y2=70, stroke=GREY),
        tag("polyline", points=line, fill="none", stroke=BLUE, stroke_width=1.8),
    ]
    return tag("svg", parts, viewBox="0 0 160 74", role="img", aria_label=label, class_="small")


def small_histogram(
    counts: Sequence[int], low: float, high: float, chosen: tuple[float, float], label: str
) -> Html:
    """Logarithmic counts, and the chosen range as a bar with two ends below and a light field behind."""
    left, right = min(low, chosen[0]), max(high, chosen[1])
    across = 156 / max(1e-30, right - left)
    tallest = math.log1p(max([1, *counts]))
    width = (high - low) / max(1, len(counts)) * across
    start = 2 + (low - left) * across
    outline = [f"M{start:.1f} 62"]
    for index, count in enumerate(counts):
        y = 62 - 58 * math.log1p(max(0, count)) / tallest
        outline.append(f"V{y:.1f}H{start + (index + 1) * width:.1f}")
    outline.append("V62Z")
    a, b = (2 + (end - left) * across for end in chosen)
    parts = [
        tag("rect", x=f"{a:.1f}", y=2, width=f"{max(1.0, b - a):.1f}", height=60, fill="#fbe9dc"),
        tag("path", d="".join(outline), fill=BLUE),
        tag("path", d=f"M{a:.1f} 64V72M{a:.1f} 68H{b:.1f}M{b:.1f} 64V72", stroke=VERMILLION, stroke_width=2),
    ]
    return tag("svg", parts, viewBox="0 0 160 74", role="img", aria_label=label, class_="small")


def legend(first: str, second: str) -> Html:
    """What disc and diamond stand for."""
    keys = [
        tag("svg", marker(7, 7, which, 5), viewBox="0 0 14 14", class_="key", aria_hidden="true")
        for which in (False, True)
    ]
    return tag("span", keys[0], f" {first} ", keys[1], f" {second}", class_="legend")


def marker(x: float, y: float, is_second: bool, size: float) -> Html:
    """A blue disc, or a vermillion diamond that leaves a disc at the same place to be seen."""
    if not is_second:
        return tag("circle", cx=f"{x:.1f}", cy=f"{y:.1f}", r=f"{size:g}", fill=BLUE)
    s = size * 1.3
    points = f"{x:.1f},{y - s:.1f} {x + s:.1f},{y:.1f} {x:.1f},{y + s:.1f} {x - s:.1f},{y:.1f}"
    return tag("polygon", points=points, fill="none", stroke=VERMILLION, stroke_width=1.6)


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers from `low` to `high`, roughly `about` of them."""
    raw = max(1e-30, high - low) / max(1, about)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(step * k, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def _whisker(low: float, high: float, y: float) -> list[Html]:
    path = f"M{low:.1f} {y:g}H{high:.1f}M{low:.1f} {y - 4:g}V{y + 4:g}M{high:.1f} {y - 4:g}V{y + 4:g}"
    return [tag("path", d=path, stroke=INK, stroke_width=1.2, fill="none")]


def _text(
    x: float,
    y: float,
    text: str,
    anchor: str = "start",
    bold: bool = False,
    size: int = 11,
    whole: str | None = None,
    transform: str | None = None,
) -> Html:
    content = [tag("title", whole), text] if whole is not None and whole != text else text
    return tag(
        "text",
        content,
        x=f"{x:.1f}",
        y=f"{y:.1f}",
        text_anchor=anchor if anchor != "start" else None,
        font_size=size,
        font_weight="bold" if bold else None,
        fill=INK,
        transform=transform,
    )


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"…{text[1 - most :]}"


def _summary(values: Sequence[float]) -> str:
    finite = sorted(value for value in values if math.isfinite(value))
    if not finite:
        return "no finite values"
    middle = finite[len(finite) // 2]
    return f"from {finite[0]:.1f} to {finite[-1]:.1f}, median {middle:.1f}"
