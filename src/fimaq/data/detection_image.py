"""From an image to a detector's input: resized with its aspect kept, normalised, padded below and right."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from fimaq.config import LARGEST_IMAGE
from fimaq.data.image import load_image
from fimaq.errors import InputError

MEAN = (123.675, 116.28, 103.53)
STD = (58.395, 57.12, 57.375)
DIVISOR = 32


class DetectionImage(NamedTuple):
    """`pixels` (3, h, w) float32 normalised; `scale_factor` (w, h): new over old; `original_size` (h, w)."""

    pixels: Tensor
    scale_factor: tuple[float, float]
    original_size: tuple[int, int]


@dataclass(frozen=True)
class DetectionPreprocessing:
    """How images become a detector's input: at most `short` and `long` pixels per edge; plain data."""

    short: int = 800
    long: int = 1333
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD

    def as_dict(self) -> dict[str, Any]:
        return {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "DetectionPreprocessing":
        try:
            edges = (int(values["short"]), int(values["long"]))
            if not 1 <= edges[0] <= edges[1] <= LARGEST_IMAGE:
                raise ValueError(f"edges of {edges} pixels")
            mean, std = (tuple(float(value) for value in values[key]) for key in ("mean", "std"))
            return cls(*edges, mean, std)
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise InputError(f"the run's preprocessing {values!r:.200} is not a detector's: {error}") from None

    def describe(self) -> str:
        return (
            f"resized to fit {self.short} x {self.long}, aspect kept, bilinear; padded to multiples of {DIVISOR}"
        )

    def resized(self, image: Image.Image) -> DetectionImage:
        """The image resized and normalised.

        As in MMDetection, the interpolation is bilinear without antialiasing and its result rounded to 8 bits.
        """
        stored = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        height, width = stored.shape[1:]
        scale = min(self.long / max(height, width), self.short / min(height, width))
        size = tuple(max(1, int(edge * scale + 0.5)) for edge in (height, width))
        pixels = F.interpolate(stored[None].float(), size, mode="bilinear", align_corners=False)[0].round()
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (self.mean, self.std))
        return DetectionImage((pixels - mean) / std, (size[1] / width, size[0] / height), (height, width))

    def load(self, path: Path) -> DetectionImage:
        """The image at `path`. Its stored pixels are used, EXIF rotation is ignored: so COCO's boxes are meant."""
        return self.resized(load_image(path))

    @property
    def canvas(self) -> tuple[int, int]:
        """(height, width) that holds a resized landscape image."""
        height, width = (DIVISOR * math.ceil(edge / DIVISOR) for edge in (self.short, self.long))
        return height, width

    def on_canvas(self, image: Image.Image) -> Tensor:
        """A calibration image: all are of one size, (3, *canvas), so an upright one loses its lower part."""
        height, width = self.canvas
        return pad_to_canvas([self.resized(image).pixels[:, :height, :width]], self.canvas)[0]


def pad_to(images: Sequence[Tensor], divisor: int = DIVISOR) -> Tensor:
    """(3, h, w) images of any sizes -> (n, 3, H, W): zeros below and right, up to multiples of `divisor`."""
    height, width = (divisor * math.ceil(max(image.shape[axis] for image in images) / divisor) for axis in (1, 2))
    return pad_to_canvas(images, (height, width))


def pad_to_canvas(images: Sequence[Tensor], canvas: tuple[int, int]) -> Tensor:
    """(3, h, w) images of any sizes -> (n, 3, H, W) with `canvas` = (H, W): zeros below and right."""
    padded = torch.zeros(len(images), 3, *canvas)
    for index, image in enumerate(images):
        height, width = image.shape[1:]
        if height > canvas[0] or width > canvas[1]:
            raise InputError(f"an image of {height} x {width} does not fit a canvas of {canvas[0]} x {canvas[1]}")
        padded[index, :, :height, :width] = image
    return padded
