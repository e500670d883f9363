"""Write a COCO-format data set of textured shapes: instance segmentation that a small network learns in minutes.

    python benchmarks/make_shapes.py OUT --train 2000 --val 300 --size 256 --seed 0

OUT gets annotations/instances_{train,val}.json, train/ and val/. An image holds 1 to 8 shapes on a textured
ground: small, medium and large in COCO's sense, rotated, cut by the border, hidden by one another. A mask is what
can be seen of a shape; a shape of which less than a quarter can be seen is left out of the image. The same seed
and size give the same files; image i does not depend on how many there are.
"""

import argparse
import json
import math
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image
from pycocotools import mask as coder

Array = NDArray[np.float64]

SPLITS = ("train", "val")
MOST_SHAPES = 8
LEAST_VISIBLE = 0.25
LEAST_PIXELS = 40
QUALITY = 92
SUBPIXELS = 2
AREAS = ((150, 900), (1100, 8500), (9600, 14400))
"""Small, medium, large: pixels, drawn log-uniformly. COCO's limits are 32² = 1024 and 96² = 9216."""
SHARES = (0.35, 0.45, 0.2)


def disk(u: Array, v: Array) -> NDArray[np.bool_]:
    return u**2 + v**2 < 1


def ring(u: Array, v: Array) -> NDArray[np.bool_]:
    squared = u**2 + v**2
    return (squared < 1) & (squared > 0.55**2)


def rectangle(u: Array, v: Array) -> NDArray[np.bool_]:
    return (np.abs(u) < 0.9) & (np.abs(v) < 0.5)


def triangle(u: Array, v: Array) -> NDArray[np.bool_]:
    return (v > -0.5) & (v + math.sqrt(3) * np.abs(u) < 1)


def star(u: Array, v: Array) -> NDArray[np.bool_]:
    """Five points at radius 1, the notches between them at 0.42."""
    fifth = 2 * math.pi / 5
    angle = np.abs(np.mod(np.arctan2(v, u), fifth) - fifth / 2)  # 0 at a notch, fifth / 2 at a point
    radius = np.hypot(u, v)
    # The edge runs from (0.42, 0) to (cos, sin) of fifth / 2 in the coordinates of the notch.
    tip_x, tip_y = math.cos(fifth / 2), math.sin(fifth / 2)
    x, y = radius * np.cos(angle), radius * np.sin(angle)
    return (x - 0.42) * tip_y < y * (tip_x - 0.42)


def cross(u: Array, v: Array) -> NDArray[np.bool_]:
    u, v = np.abs(u), np.abs(v)
    return ((u < 0.3) & (v < 1)) | ((v < 0.3) & (u < 1))


Shape = Callable[[Array, Array], NDArray[np.bool_]]
SHAPES: tuple[Shape, ...] = (disk, ring, rectangle, triangle, star, cross)
"""Each tells which points (u, v) it covers, all within 1.1 of (0, 0); category i + 1 is SHAPES[i]."""


def unit_area(shape: Shape) -> float:
    u, v = np.meshgrid(*[np.linspace(-1.1, 1.1, 441)] * 2)
    return float(shape(u, v).mean()) * 2.2**2


UNIT_AREAS = tuple(unit_area(shape) for shape in SHAPES)


class Drawn(NamedTuple):
    """A shape in its place: how much of each pixel it covers (size, size), and its whole area in pixels."""

    category: int
    coverage: Array
    area: float


def draw_shape(rng: Generator, size: int) -> Drawn:
    """A shape of random kind, size, place and rotation, of which a part may lie outside of the image."""
    kind = int(rng.integers(len(SHAPES)))
    low, high = AREAS[rng.choice(len(AREAS), p=SHARES)]
    area = min(math.exp(rng.uniform(math.log(low), math.log(high))), 0.22 * size**2)
    radius = math.sqrt(area / UNIT_AREAS[kind])
    margin = min(0.6 * radius, size / 2)
    centre_x, centre_y = rng.uniform(margin, size - margin, 2)
    turn = rng.uniform(0, 2 * math.pi)
    columns, rows = (window(centre, 1.1 * radius, size) for centre in (centre_x, centre_y))
    x, y = (subpixels(columns) - centre_x)[None, :] / radius, (subpixels(rows) - centre_y)[:, None] / radius
    u, v = x * math.cos(turn) + y * math.sin(turn), y * math.cos(turn) - x * math.sin(turn)
    inside = SHAPES[kind](u, v).reshape(y.size // SUBPIXELS, SUBPIXELS, x.size // SUBPIXELS, SUBPIXELS)
    coverage = np.zeros((size, size))
    coverage[rows, columns] = inside.mean(axis=(1, 3))
    return Drawn(kind + 1, coverage, area)


def window(centre: float, reach: float, size: int) -> slice:
    """The pixels of 0..size-1 within `reach` of `centre`."""
    return slice(max(0, math.floor(centre - reach)), min(size, math.ceil(centre + reach)))


def subpixels(pixels: slice) -> Array:
    """The centres of SUBPIXELS points in each pixel, in pixels."""
    return pixels.start + (np.arange((pixels.stop - pixels.start) * SUBPIXELS) + 0.5) / SUBPIXELS


def texture(rng: Generator, size: int, first: Array, second: Array) -> Array:
    """(size, size, 3) between two colours: stripes, checks, blots of noise or a gradient."""
    y, x = np.mgrid[:size, :size].astype(float)
    turn = rng.uniform(0, 2 * math.pi)
    along = x * math.cos(turn) + y * math.sin(turn)
    across = y * math.cos(turn) - x * math.sin(turn)
    period = rng.uniform(5, 20)
    kind = rng.integers(4)
    if kind == 0:
        share = along % period < period / 2
    elif kind == 1:
        share = (along % period < period / 2) ^ (across % period < period / 2)
    elif kind == 2:
        cells = max(2, int(size / period))
        blots = Image.fromarray(rng.random((cells, cells), dtype=np.float32))
        share = np.clip(np.asarray(blots.resize((size, size), Image.Resampling.BICUBIC)), 0, 1)
    else:
        share = (along - along.min()) / np.ptp(along)
    return first + np.asarray(share, dtype=float)[:, :, None] * (second - first)


def colours(rng: Generator, contrast: float, apart_from: Array | None = None) -> tuple[Array, Array]:
    """Two colours (3,) in 0..255 about `contrast` apart, their mean well apart from another colour."""
    while True:
        mean = rng.uniform(40, 215, 3)
        if apart_from is None or np.linalg.norm(mean - apart_from) > 80:
            break
    direction = rng.normal(size=3)
    offset = direction / np.linalg.norm(direction) * contrast / 2
    return np.clip(mean - offset, 0, 255), np.clip(mean + offset, 0, 255)


def scene(rng: Generator, size: int) -> tuple[NDArray[np.uint8], list[tuple[int, NDArray[np.bool_]]]]:
    """An image (size, size, 3) and the (category, visible pixels (size, size)) of each shape in it."""
    covered = np.zeros((size, size), dtype=bool)
    shapes: list[Drawn] = []
    visible: list[tuple[int, NDArray[np.bool_]]] = []
    # From front to back: what lies behind can no longer hide a shape that was kept.
    for _ in range(rng.integers(1, MOST_SHAPES + 1)):
        drawn = draw_shape(rng, size)
        mask = (drawn.coverage >= 0.5) & ~covered
        if mask.sum() < max(LEAST_PIXELS, LEAST_VISIBLE * drawn.area):
            continue
        covered |= mask
        shapes.append(drawn)
        visible.append((drawn.category, mask))
    ground = colours(rng, contrast=60)
    canvas = texture(rng, size, *ground)
    ground_mean = (ground[0] + ground[1]) / 2
    for drawn in reversed(shapes):
        pattern = texture(rng, size, *colours(rng, contrast=110, apart_from=ground_mean))
        canvas += drawn.coverage[:, :, None] * (pattern - canvas)
    canvas += rng.normal(scale=5, size=canvas.shape)
    return np.clip(canvas.round(), 0, 255).astype(np.uint8), visible


def write_image(index: int, folder: Path, split: str, size: int, seed: int) -> list[dict[str, Any]]:
    """Write image `index` of a split; its annotations, without their ids."""
    rng = np.random.default_rng([seed, SPLITS.index(split), index])
    pixels, visible = scene(rng, size)
    Image.fromarray(pixels).save(folder / file_name(index), quality=QUALITY)
    annotations = []
    for category, mask in visible:
        rle = coder.encode(np.asfortranarray(mask, dtype=np.uint8))
        annotations.append(
            {
                "image_id": index + 1,
                "category_id": category,
                "bbox": coder.toBbox(rle).tolist(),
                "area": int(mask.sum()),
                "iscrowd": 0,
                "segmentation": {"size": [size, size], "counts": rle["counts"].decode()},
            }
        )
    return annotations


def file_name(index: int) -> str:
    return f"{index + 1:06d}.jpg"


def write_split(out: Path, split: str, count: int, size: int, seed: int, processes: int) -> None:
    """Write `count` images and the instances file of a split."""
    folder = out / split
    folder.mkdir(parents=True)
    write = partial(write_image, folder=folder, split=split, size=size, seed=seed)
    if processes > 1:
        with ProcessPoolExecutor(processes) as pool:
            by_image = list(pool.map(write, range(count), chunksize=16))
    else:
        by_image = [write(index) for index in range(count)]
    annotations = [annotation for of_image in by_image for annotation in of_image]
    content = {
        "info": {"description": f"textured shapes, {split}, seed {seed}"},
        "images": [{"id": i + 1, "file_name": file_name(i), "width": size, "height": size} for i in range(count)],
        "annotations": [{"id": number, **annotation} for number, annotation in enumerate(annotations, start=1)],
        "categories": [{"id": number, "name": shape.__name__} for number, shape in enumerate(SHAPES, start=1)],
    }
    (out / "annotations").mkdir(exist_ok=True)
    (out / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
    print(f"{split}: {count} images, {len(annotations)} shapes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a new folder")
    parser.add_argument("--train", type=int, default=2000, help="training images")
    parser.add_argument("--val", type=int, default=300, help="validation images")
    parser.add_argument("--size", type=int, default=256, help="width and height in pixels, 64 or more")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2, help="does not change the files")
    options = parser.parse_args()
    if options.size < 64:
        parser.error(f"--size {options.size}: expected 64 or more")
    for split in SPLITS:
        if (options.out / split).exists():
            parser.error(f"{options.out / split} exists: give a new folder")
    for split in SPLITS:
        write_split(options.out, split, getattr(options, split), options.size, options.seed, options.processes)


if __name__ == "__main__":
    main()
