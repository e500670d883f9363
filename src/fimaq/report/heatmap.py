"""Drawing matrices as heat maps and numbers as curves, with Pillow and NumPy alone.

Heat maps show magnitudes. Their colours go from dark to light with the value, so that they keep their order in
grey and for readers who do not tell red from green; curves differ in dashes as well as in colour.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

ANCHORS = ((38, 10, 74), (50, 70, 136), (34, 126, 142), (64, 182, 116), (166, 216, 58), (252, 234, 70))
"""Colours of equally spaced values from 0 to 1, each lighter than the one before."""
INKS = ((0, 114, 178), (213, 94, 0), (0, 158, 115), (90, 90, 90), (204, 121, 167), (86, 180, 233))
DASHES = ((1, 0), (9, 5), (3, 4), (14, 4), (6, 6), (2, 8))
"""Pixels drawn and left out, one pair for each curve."""
DECADES = 4.0
"""How far a logarithmic scale reaches below the largest value."""
SIDE = 384
"""A panel is enlarged by a whole number, to about this many pixels."""
MARGIN, BAR, TEXT, LINE = 24, 18, 15, 20
BLACK, GREY, WHITE = (20, 20, 20), (205, 205, 205), (255, 255, 255)

Array = NDArray[np.floating]


def colours(values: Array) -> NDArray[np.uint8]:
    """Values in [0, 1], any shape, to RGB: (...) -> (..., 3). What is outside takes the nearest end's colour."""
    places = np.linspace(0, 1, len(ANCHORS))
    channels = [np.interp(values, places, [anchor[c] for anchor in ANCHORS]) for c in range(3)]
    return np.stack(channels, axis=-1).round().astype(np.uint8)


def shares_of_scale(magnitudes: Array, largest: float, log: bool) -> Array:
    """Where magnitudes stand between the two ends of the colour scale, in [0, 1], same shape.

    The scale ends at `largest` and starts at 0 or, with `log`, DECADES below. Without a largest value, or where a
    value is not a number, it is the dark end.
    """
    if not largest > 0:
        return np.zeros_like(magnitudes)
    share = np.nan_to_num(magnitudes / largest, nan=0.0, posinf=1.0)
    if log:
        share = 1 + np.log10(np.maximum(share, 10.0**-DECADES)) / DECADES
    return np.clip(share, 0, 1)


def heat_maps(matrices: Mapping[str, Array], title: str, log: bool = True) -> Image.Image:
    """Matrices (rows, columns) of one shape side by side, on one scale, with that scale at the right.

    The keys of `matrices` are the captions above the panels; they may have several lines.
    """
    magnitudes = {caption: np.abs(np.asarray(m, dtype=np.float64)) for caption, m in matrices.items()}
    finite = [m[np.isfinite(m)] for m in magnitudes.values()]
    largest = max((float(m.max()) for m in finite if m.size), default=0.0)
    rows, columns = next(iter(magnitudes.values())).shape
    times = max(1, SIDE // max(rows, columns))
    width, height = columns * times, rows * times
    top = MARGIN + 2 * LINE + LINE * max(caption.count("\n") + 1 for caption in magnitudes)
    steps = [max(width, _width_of(caption)) + MARGIN for caption in magnitudes]
    size = (MARGIN + sum(steps) + BAR + 5 * TEXT + MARGIN, top + max(height, 5 * LINE) + MARGIN)
    picture = Image.new("RGB", (max(size[0], _width_of(title) + 2 * MARGIN), size[1]), WHITE)
    draw = ImageDraw.Draw(picture)
    draw.text((MARGIN, MARGIN), title, BLACK, font=_font())
    left = MARGIN
    for (caption, matrix), step in zip(magnitudes.items(), steps, strict=True):
        draw.multiline_text((left, MARGIN + 2 * LINE - 6), caption, BLACK, font=_font(), spacing=LINE - TEXT)
        cells = Image.fromarray(colours(shares_of_scale(matrix, largest, log)))
        picture.paste(cells.resize((width, height), Image.Resampling.NEAREST), (left, top))
        left += step
    _draw_scale(picture, (left, top), max(height, 5 * LINE), largest, log)
    return picture


def curves(lines: Mapping[str, Sequence[float]], title: str, across: str, up: str) -> Image.Image:
    """Curves over 1, 2, 3, ...: name -> values of at least 0, with axes from 0, a grid and a legend.

    `across` and `up` name the axes. The legend stands at the right, in the order given.
    """
    legend = MARGIN + 40 + max(_width_of(name) for name in lines)
    left, top, width, height = MARGIN + 4 * TEXT, MARGIN + 3 * LINE, 560, 340
    picture = Image.new("RGB", (left + width + legend + MARGIN, top + height + 3 * LINE + MARGIN), WHITE)
    draw = ImageDraw.Draw(picture)
    count = max(len(values) for values in lines.values())
    most = max(1.0, *(value for values in lines.values() for value in values if np.isfinite(value)))
    draw.text((MARGIN, MARGIN), title, BLACK, font=_font())
    draw.text((MARGIN, top - LINE - 6), up, BLACK, font=_font())
    draw.text((left + width / 2, top + height + 2 * LINE), across, BLACK, font=_font(), anchor="mm")

    def place(number: float, value: float) -> tuple[float, float]:
        return left + width * (number - 1) / max(1, count - 1), top + height * (1 - value / most)

    for share in np.linspace(0, 1, 6):
        level = place(1, share * most)[1]
        draw.line((left, level, left + width, level), GREY)
        draw.text((left - 8, level), f"{share * most:.2g}", BLACK, font=_font(), anchor="rm")
    for number in range(1, count + 1, max(1, count // 15)):
        draw.text((place(number, 0)[0], top + height + 8), str(number), BLACK, font=_font(), anchor="mt")
    for position, (name, values) in enumerate(lines.items()):
        ink, dashes = INKS[position % len(INKS)], DASHES[position % len(DASHES)]
        points = [place(n, v) for n, v in enumerate(values, start=1) if np.isfinite(v)]
        _dashed(draw, points, ink, dashes)
        for x, y in points:
            draw.ellipse((x - 3, y - 3, x + 3, y + 3), fill=ink)
        level = top + TEXT / 2 + position * LINE
        _dashed(draw, [(left + width + MARGIN, level), (left + width + MARGIN + 30, level)], ink, dashes)
        draw.text((left + width + MARGIN + 38, level), name, BLACK, font=_font(), anchor="lm")
    return picture


def _draw_scale(picture: Image.Image, corner: tuple[int, int], height: int, largest: float, log: bool) -> None:
    """The colour scale, largest value on top, with numbers beside it."""
    left, top = corner
    ramp = np.linspace(1, 0, height)[:, None].repeat(BAR, axis=1)
    picture.paste(Image.fromarray(colours(ramp)), corner)
    draw = ImageDraw.Draw(picture)
    ticks = int(DECADES) if log else 4
    for number in range(ticks + 1):
        value = largest * 10.0**-number if log else largest * (1 - number / ticks)
        level = top + (height - 1) * number / ticks
        draw.line((left + BAR, level, left + BAR + 4, level), BLACK)
        draw.text((left + BAR + 8, level), f"{value:.1e}", BLACK, font=_font(12), anchor="lm")


def _dashed(
    draw: ImageDraw.ImageDraw,
    points: Sequence[tuple[float, float]],
    ink: tuple[int, int, int],
    dashes: tuple[int, int],
) -> None:
    """A line through `points`; the dashes run on around its corners."""
    drawn, left_out = dashes
    travelled = 0.0
    for start, stop in pairwise(points):
        (x, y), (dx, dy) = start, np.subtract(stop, start)
        length = float(np.hypot(dx, dy))
        for pixel in range(int(length) + 1):
            if (travelled + pixel) % (drawn + left_out) < drawn:
                share = pixel / max(length, 1.0)
                cx, cy = x + share * dx, y + share * dy
                draw.rectangle((cx - 0.5, cy - 0.5, cx + 1, cy + 1), fill=ink)
        travelled += length


def _font(size: int = TEXT) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _width_of(text: str) -> int:
    """Pixels that the longest line of `text` takes."""
    return max(int(_font().getlength(line)) + 1 for line in text.split("\n"))
