"""COCO-format detection data: the instances file, checked once when it is opened."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fimaq.data.image import FORMATS, open_file
from fimaq.errors import InputError

_KEYS = "the lists 'images', 'annotations' and 'categories'"

Segmentation = list[list[float]] | dict[str, Any] | None
"""Polygons [[x, y, x, y, ...], ...]; {"size": [h, w], "counts": list or str} (RLE by columns); None: unknown."""


@dataclass(frozen=True)
class CocoImage:
    """One image of the set; `width` and `height` are those of the file at `path`."""

    id: int
    file_name: str
    width: int
    height: int
    path: Path


@dataclass(frozen=True)
class CocoCategory:
    """A category as the file names it. A model's label is its rank among the ids."""

    id: int
    name: str


@dataclass(frozen=True)
class CocoAnnotation:
    """One object. `box` is (x, y, width, height) in pixels, `label` the rank of `category_id`."""

    id: int
    image_id: int
    category_id: int
    label: int
    box: tuple[float, float, float, float]
    area: float
    crowd: bool
    segmentation: Segmentation


@dataclass(frozen=True)
class CocoSet:
    """Images, categories and the objects of each image.

    Degenerate boxes (width or height <= 0) and images without objects are kept, as COCO's own tools do: the
    former are objects that no detection can match, on the latter every detection is a false positive.
    """

    images: dict[int, CocoImage]
    """By id, in the order of the file."""
    categories: list[CocoCategory]
    """Sorted by id: label i is categories[i]."""
    annotations: dict[int, list[CocoAnnotation]]
    """By image id; every image has an entry."""

    @classmethod
    def open(cls, annotations: Path, images: Path) -> "CocoSet":
        """Read the instances file `annotations`, of images in the folder `images`, and check all of it."""
        parts = _Parts(annotations)
        if not images.is_dir():
            raise InputError(f"folder {images} does not exist: expected the images of {annotations}")
        listed = {id: _image(parts, record, id, images) for id, record in parts.records("images", "image")}
        found = parts.records("categories", "category")
        categories = sorted((_category(parts, record, id) for id, record in found), key=lambda c: c.id)
        labels = {category.id: label for label, category in enumerate(categories)}
        by_image: dict[int, list[CocoAnnotation]] = {id: [] for id in listed}
        for id, record in parts.records("annotations", "annotation"):
            annotation = _annotation(parts, record, id, listed, labels)
            by_image[annotation.image_id].append(annotation)
        return cls(listed, categories, by_image)

    @property
    def category_ids(self) -> list[int]:
        """The file's category id of each label."""
        return [category.id for category in self.categories]

    def rle(self, annotation: CocoAnnotation) -> dict[str, Any]:
        """The object's mask as a compressed RLE, from whichever form the file has; its box where it has none."""
        coder = pycocotools("mask")
        image = self.images[annotation.image_id]
        segmentation = annotation.segmentation
        if isinstance(segmentation, dict):
            if isinstance(segmentation["counts"], str):
                return segmentation
            return coder.frPyObjects(segmentation, image.height, image.width)
        if segmentation is None:
            x, y, width, height = annotation.box
            segmentation = [[x, y, x, y + height, x + width, y + height, x + width, y]]
        return coder.merge(coder.frPyObjects(segmentation, image.height, image.width))

    def mask(self, annotation: CocoAnnotation) -> NDArray[np.bool_]:
        """The object's pixels, (height, width) of its image."""
        return pycocotools("mask").decode(self.rle(annotation)).astype(bool)


def pycocotools(module: str) -> Any:
    """A module of pycocotools, which only detection needs; an error that says what to install without it."""
    try:
        return import_module(f"pycocotools.{module}")
    except ImportError as error:
        raise InputError(f"COCO data needs more packages ({error}): pip install 'fimaq[detection]'") from None


class _Parts:
    """The instances file as JSON, with errors that name it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            content = json.loads(path.read_bytes())
        except OSError as error:
            raise self.error(f"cannot be read ({error.strerror}): expected a COCO instances file") from None
        except (ValueError, RecursionError) as error:
            raise self.error(f"is not JSON ({error}): expected a COCO instances file") from None
        if not isinstance(content, dict):
            raise self.error(f"holds a {type(content).__name__}: expected an object with {_KEYS}")
        self.content = content

    def error(self, message: str) -> InputError:
        return InputError(f"annotations {self.path}: {message}")

    def records(self, key: str, kind: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """(id, record) of everything listed under `key`."""
        if not isinstance(self.content.get(key), list):
            state = "is not a list" if key in self.content else "is missing"
            raise self.error(f"key {key!r} {state}: expected an object with {_KEYS}")
        seen: set[int] = set()
        for place, record in enumerate(self.content[key]):
            if not isinstance(record, dict):
                raise self.error(f"{key}[{place}] is {record!r}: expected an object with an id")
            id = self.whole(record, "id", f"{key}[{place}]")
            if id in seen:
                raise self.error(f"{kind} id {id} is given twice: ids must be unique")
            seen.add(id)
            yield id, record

    def value(self, record: dict[str, Any], key: str, name: str, expected: str) -> Any:
        if key not in record:
            raise self.error(f"{name} has no {key!r}: expected {expected}")
        return record[key]

    def whole(self, record: dict[str, Any], key: str, name: str, least: int = 0) -> int:
        expected = f"a whole number of at least {least}"
        value = self.value(record, key, name, expected)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.error(f"{key!r} of {name} is {value!r}: expected {expected}")
        return value

    def text(self, record: dict[str, Any], key: str, name: str) -> str:
        value = self.value(record, key, name, "a text")
        if not isinstance(value, str) or not value:
            raise self.error(f"{key!r} of {name} is {value!r}: expected a text")
        return value

    def numbers(self, value: Any, name: str, expected: str) -> list[float]:
        """`value`, a list of finite numbers, as floats."""
        try:
            array = np.asarray(value if isinstance(value, list) else None)
        except ValueError:  # lists of several lengths inside
            array = np.asarray(None)
        if array.ndim != 1 or array.dtype.kind not in "iuf" or not np.isfinite(array).all():
            raise self.error(f"{name} is {_short(value)}: expected {expected}")
        return array.astype(float).tolist()


def _image(parts: _Parts, record: dict[str, Any], id: int, folder: Path) -> CocoImage:
    name = f"image {id}"
    file_name = parts.text(record, "file_name", name)
    width, height = (parts.whole(record, key, name, least=1) for key in ("width", "height"))
    path = folder / file_name
    try:
        # Only the header is read. Its size is that of the stored pixels, before any EXIF rotation.
        with open_file(path) as stream, Image.open(stream, formats=FORMATS) as file:
            size = file.size
    except FileNotFoundError:
        raise parts.error(f"{name} is {file_name!r}, but {path} does not exist: add it or drop {name}") from None
    except Exception as error:  # Pillow's readers share no class of error
        raise parts.error(f"{name} is {path}, which cannot be read as an image ({error})") from None
    if size != (width, height):
        raise parts.error(
            f"{name} is {width} x {height} pixels, but {path} has {size[0]} x {size[1]}: both must agree"
        )
    return CocoImage(id, file_name, width, height, path)


def _category(parts: _Parts, record: dict[str, Any], id: int) -> CocoCategory:
    return CocoCategory(id, parts.text(record, "name", f"category {id}"))


def _annotation(
    parts: _Parts, record: dict[str, Any], id: int, images: dict[int, CocoImage], labels: dict[int, int]
) -> CocoAnnotation:
    name = f"annotation {id}"
    image_id, category_id = (parts.whole(record, key, name) for key in ("image_id", "category_id"))
    if image_id not in images:
        raise parts.error(f"{name} is of image {image_id}, which is not one of its {len(images)} images")
    if category_id not in labels:
        raise parts.error(f"{name} is of category {category_id}: expected one of {_short(list(labels))}")
    expected = "[x, y, width, height]"
    box = parts.numbers(parts.value(record, "bbox", name, expected), f"'bbox' of {name}", expected)
    if len(box) != 4:
        raise parts.error(f"'bbox' of {name} is {_short(box)}: expected {expected}")
    expected = "a number of pixels"
    (area,) = parts.numbers([parts.value(record, "area", name, expected)], f"'area' of {name}", expected)
    crowd = record.get("iscrowd", 0)
    if crowd not in (0, 1):
        raise parts.error(f"'iscrowd' of {name} is {crowd!r}: expected 0 or 1")
    segmentation = _segmentation(parts, record.get("segmentation"), f"'segmentation' of {name}", images[image_id])
    x, y, width, height = box
    return CocoAnnotation(
        id, image_id, category_id, labels[category_id], (x, y, width, height), area, bool(crowd), segmentation
    )


def _segmentation(parts: _Parts, value: Any, name: str, image: CocoImage) -> Segmentation:
    if value is None or value == []:
        return None
    if isinstance(value, list):
        # pycocotools would take a list of 4 numbers for a box.
        expected = "polygons, each a list [x, y, x, y, ...] of 3 points or more"
        polygons = [parts.numbers(polygon, f"a polygon in {name}", expected) for polygon in value]
        for polygon in polygons:
            if len(polygon) < 6 or len(polygon) % 2:
                raise parts.error(f"a polygon in {name} is {_short(polygon)}: expected {expected}")
        return polygons
    if not isinstance(value, dict) or not isinstance(value.get("counts"), list | str):
        raise parts.error(f"{name} is {_short(value)}: expected polygons or an RLE with 'size' and 'counts'")
    size = [image.height, image.width]
    if value.get("size") != size:
        raise parts.error(
            f"the size of {name} is {value.get('size')!r}: expected {size}, the image's height, width"
        )
    # pycocotools reads unset memory where the runs do not fill the image.
    runs = run_lengths(value["counts"]) if isinstance(value["counts"], str) else value["counts"]
    if not all(isinstance(run, int) and run >= 0 for run in runs) or sum(runs) != math.prod(size):
        raise parts.error(
            f"the counts of {name} are {_short(value['counts'])}: expected run lengths of at least 0 that add up "
            f"to {math.prod(size)} pixels"
        )
    return {"size": size, "counts": value["counts"]}


def run_lengths(counts: str) -> list[int]:
    """The runs, of 0s and 1s in turn, that a compressed RLE's `counts` stand for; [-1] where they are malformed.

    Each character holds 5 bits, least first, and a bit that says whether more follow. From the fourth run on,
    the difference to the run two before is stored.
    """
    stored: list[int] = []
    value, shift = 0, 0
    for byte in counts.encode():
        bits = byte - 48
        if not 0 <= bits < 64:
            return [-1]
        value |= (bits & 31) << shift
        shift += 5
        if not bits & 32:
            stored.append(value - (1 << shift) if bits & 16 else value)
            value, shift = 0, 0
    if shift:
        return [-1]
    odd, even = list(accumulate(stored[1::2])), list(accumulate(stored[2::2]))
    runs = stored[:1] + [run for pair in zip(odd, even, strict=False) for run in pair]
    return runs + odd[len(even) :]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def find_coco(root: Path, split: Literal["train", "val"]) -> tuple[Path, Path]:
    """(instances file, image folder) of a split below `root`, for `CocoSet.open`; COCO's own names come first."""
    tried = []
    for name in (f"{split}2017", split):
        annotations, images = root / "annotations" / f"instances_{name}.json", root / name
        if annotations.is_file() and images.is_dir():
            return annotations, images
        tried.append(f"annotations/{annotations.name} with {name}/")
    raise InputError(f"{root} holds no COCO {split} set: looked for {' and '.join(tried)}")


def calibration_folder(root: Path) -> Path:
    """Where the calibration images below `root` are: in the training folder of a COCO data set, else in `root`."""
    for name in ("train2017", "train"):
        if (root / name).is_dir():
            return root / name
    if (root / "annotations").is_dir():  # all of it would include the validation images
        raise InputError(
            f"{root} has annotations/, but neither train2017/ nor train/: give --calib DIR with images"
        )
    return root
