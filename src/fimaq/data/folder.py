"""Image folders: listing them, drawing the calibration images, and iterating over validation images."""

import hashlib
import io
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from fimaq.data.image import UnreadableImage, load_image, open_file
from fimaq.data.ordered import default_workers, map_in_order
from fimaq.data.preprocess import Transform
from fimaq.errors import InputError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm")
BATCHES_AHEAD = 3
MOST_UNEVEN = 100
"""How many times as long as wide an image may be. Its short edge is scaled to the model's input and its long one
with it, so that a line of pixels in a small file would become gigabytes."""

OnProgress = Callable[[int, int], None]
"""Called with the number of images loaded and the number wanted."""


def list_images(folder: Path) -> list[Path]:
    """Every image file below `folder`, at any depth, sorted by its path relative to `folder`.

    Links to folders are followed; hidden files and folders (`._photo.jpg`, `.cache`) are left out.
    """
    check_folder(folder)
    images = find_images(folder)
    if not images:
        raise InputError(f"folder {folder} holds no images: files ending in {', '.join(IMAGE_SUFFIXES)} are read")
    return images


def check_folder(folder: Path) -> None:
    """Raise InputError where `folder` is missing or is not a folder."""
    expected = f"expected a folder of images ({', '.join(IMAGE_SUFFIXES)})"
    if not folder.exists():
        raise InputError(f"folder {folder} does not exist: {expected}")
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: {expected}")


def find_images(folder: Path) -> list[Path]:
    """`list_images` of a folder that may hold none."""
    found: list[str] = []
    visited: set[str] = set()
    for root, folders, files in os.walk(folder, onerror=_refuse, followlinks=True):
        # A link may point back up its own path; each real folder is entered once.
        real = os.path.realpath(root)
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        inside = Path(root).relative_to(folder)
        found += [(inside / name).as_posix() for name in files if names_image(name)]
    return [folder / name for name in sorted(found)]


def _refuse(error: OSError) -> None:
    """Without the images of one folder, a result would pass for that of all."""
    raise InputError(f"folder {error.filename} cannot be read: {error.strerror}") from None


def names_image(name: str) -> bool:
    """Whether a file of this name is taken for an image."""
    return name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")


@dataclass(frozen=True)
class CalibrationSet:
    """Calibration images in memory. `images` is (n, 3, H, W) float32, normalised, in the order of `paths`."""

    images: Tensor
    paths: list[Path]
    skipped: list[tuple[Path, str]]
    fingerprint: str
    """sha256 (hex) over each used image's relative path and file contents, in order."""


class _Decoded(NamedTuple):
    image: Tensor
    digest: bytes


def load_calibration(
    folder: Path,
    size: int,
    transform: Transform,
    seed: int,
    progress: OnProgress | None = None,
    fewer: bool = False,
) -> CalibrationSet:
    """Draw `size` images from `folder`, at any depth; the same files and seed always give the same images.

    An unreadable file is skipped and replaced by the next one in the drawn order. `fewer`: take what can be read
    where that is less than `size`; only a folder without any readable image is an error.
    """
    if size < 1:
        raise InputError(f"calibration size {size} must be at least 1")
    order = list_images(folder)
    found = len(order)
    if found < size and not fewer:
        raise InputError(_too_few(folder, size, found, []))
    size = min(size, found)
    random.Random(seed).shuffle(order)

    images: Tensor | None = None
    paths: list[Path] = []
    skipped: list[tuple[Path, str]] = []
    digest = hashlib.sha256()
    workers = default_workers()
    decoded = map_in_order(partial(_decode, transform=transform), order, workers, ahead=2 * workers)
    for path, result in zip(order, decoded, strict=True):
        if isinstance(result, UnreadableImage):
            skipped.append((path, result.reason))
            continue
        if images is None:  # filled in place: a list and torch.stack would hold every image twice
            images = torch.empty(size, *result.image.shape)
        images[len(paths)] = result.image
        paths.append(path)
        digest.update(os.fsencode(path.relative_to(folder)) + b"\0" + result.digest)
        if progress is not None:
            progress(len(paths), size)
        if len(paths) == size:
            break
    if images is None or (len(paths) < size and not fewer):
        raise InputError(_too_few(folder, size, found, skipped))
    return CalibrationSet(images[: len(paths)], paths, skipped, digest.hexdigest())


def _decode(path: Path, transform: Transform) -> _Decoded | UnreadableImage:
    """The transformed image and its file's sha256, from one read of the file."""
    try:
        with open_file(path) as file:
            content = file.read()
    except OSError as error:
        return UnreadableImage(path, error.strerror or str(error))
    except UnreadableImage as error:
        return error
    try:
        image = _transformed(path, transform, io.BytesIO(content))
        return _Decoded(image, hashlib.sha256(content).digest())
    except UnreadableImage as error:
        return error


def _transformed(path: Path, transform: Transform, stream: IO[bytes] | None = None) -> Tensor:
    image = load_image(path, stream)
    if max(image.size) > MOST_UNEVEN * min(image.size):
        size = f"{image.width}x{image.height} pixels"
        raise UnreadableImage(path, f"{size}: one edge is more than {MOST_UNEVEN} times as long as the other")
    return transform(image)


def _too_few(folder: Path, size: int, found: int, skipped: Sequence[tuple[Path, str]]) -> str:
    readable = found - len(skipped)
    message = f"{size} calibration images were asked for, but {folder} holds {found}"
    if skipped:
        examples = "; ".join(f"{path.name}: {reason}" for path, reason in skipped[:3])
        more = "; ..." if len(skipped) > 3 else ""
        message += f", of which {len(skipped)} cannot be read ({examples}{more})"
    advice = f"ask for at most {readable} or add images" if readable else "add images"
    return f"{message}: {advice}"


class ValidationSet(Dataset[tuple[Tensor, int]]):
    """Labelled images: item i is (image (3, H, W) float32 normalised, class index).

    An unreadable file raises UnreadableImage; `validation_batches` skips and counts it instead. `limit` keeps
    that many samples, spread evenly over the list: sorted by class, every class keeps its share.
    """

    def __init__(
        self, samples: Sequence[tuple[Path, int]], transform: Transform, limit: int | None = None
    ) -> None:
        if limit is not None and limit < 1:
            raise InputError(f"limit {limit} must be at least 1 image")
        count = len(samples) if limit is None else min(limit, len(samples))
        self.samples = [samples[i * len(samples) // count] for i in range(count)]
        self.transform = transform

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, target = self.samples[index]
        return _transformed(path, self.transform), target


class ValidationBatch(NamedTuple):
    """`images` (b, 3, H, W) float32, `targets` (b,) int64, and how many unreadable files were passed over."""

    images: Tensor
    targets: Tensor
    unreadable: int


def validation_batches(
    dataset: ValidationSet, batch_size: int, workers: int | None = None
) -> Iterator[ValidationBatch]:
    """Batches of readable images in the dataset's order, decoded by threads a few batches ahead.

    Every batch but the last is full. The `unreadable` counts of all batches add up to the files skipped.
    Where no image can be read at all, InputError is raised.
    """
    if batch_size < 1:
        raise InputError(f"batch size {batch_size} must be at least 1")
    workers = default_workers() if workers is None else workers
    ahead = BATCHES_AHEAD * batch_size
    images: list[Tensor] = []
    targets: list[int] = []
    unreadable = 0
    for result in map_in_order(partial(_item, dataset), range(len(dataset)), workers, ahead):
        if isinstance(result, UnreadableImage):
            unreadable += 1
            continue
        # A full batch waits for the next readable image, so that trailing skips are counted in the last one.
        if len(images) == batch_size:
            yield ValidationBatch(torch.stack(images), torch.tensor(targets), unreadable)
            images, targets, unreadable = [], [], 0
        images.append(result[0])
        targets.append(result[1])
    if not images:
        raise InputError(f"none of the {len(dataset)} validation images can be read")
    yield ValidationBatch(torch.stack(images), torch.tensor(targets), unreadable)


def _item(dataset: ValidationSet, index: int) -> tuple[Tensor, int] | UnreadableImage:
    try:
        return dataset[index]
    except UnreadableImage as error:
        return error
