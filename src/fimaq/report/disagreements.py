"""Images on which the quantized model answers differently, as small pictures with both answers."""

import base64
import heapq
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from timm.data import ImageNetInfo, infer_imagenet_subset
from torch import Tensor

from fimaq.data.classes import are_synsets
from fimaq.data.preprocess import Preprocessing

SHOWN = 12
SIDE = 112
"""Pixels of a picture's longer side."""


@dataclass(frozen=True)
class Disagreement:
    """One image: both answers as (class, probability), the true class where it is known, and a data URI."""

    full: tuple[int, float]
    quantized: tuple[int, float]
    target: int | None
    picture: str


class Disagreements:
    """Collects images on which full precision was surest of an answer that the quantized model did not give."""

    def __init__(self, preprocessing: Preprocessing | None, most: int = SHOWN) -> None:
        self.preprocessing = preprocessing
        self.most = most
        self.images = self.count = 0
        self._best: list[tuple[float, int, Disagreement]] = []

    def add(self, images: Tensor, full: Tensor, quantized: Tensor, targets: Tensor | None = None) -> None:
        """Images (n, C, H, W) as the models take them, logits (n, classes) of both, true classes (n,) if known."""
        one, two = (logits.detach().float().cpu().softmax(-1) for logits in (full, quantized))
        answers = [probabilities.max(-1) for probabilities in (one, two)]
        for row in range(len(images)):
            self.images += 1
            first, second = (int(answer.indices[row]) for answer in answers)
            if first == second:
                continue
            self.count += 1
            surprise = float(one[row, first] - two[row, first])
            if len(self._best) == self.most and surprise <= self._best[0][0]:
                continue
            found = Disagreement(
                (first, float(answers[0].values[row])),
                (second, float(answers[1].values[row])),
                None if targets is None else int(targets[row]),
                picture_of(images[row], self.preprocessing),
            )
            keep = heapq.heappush if len(self._best) < self.most else heapq.heapreplace
            keep(self._best, (surprise, -self.images, found))

    @property
    def worst(self) -> list[Disagreement]:
        return [found for *_, found in sorted(self._best, key=lambda item: item[:2], reverse=True)]


def picture_of(image: Tensor, preprocessing: Preprocessing | None) -> str:
    """A normalised image (C, H, W) as a small JPEG in a data URI; without preprocessing, from its own extremes."""
    pixels = image.detach().float().cpu()
    if preprocessing is not None:
        mean, std = (torch.tensor(v).view(-1, 1, 1) for v in (preprocessing.mean, preprocessing.std))
        pixels = pixels * std + mean
    else:
        pixels = (pixels - pixels.min()) / (pixels.max() - pixels.min()).clamp_min(1e-12)
    grey = pixels.shape[0] != 3
    pixels = pixels[:1].expand(3, -1, -1) if grey else pixels
    array = (pixels.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    small = Image.fromarray(array)
    small.thumbnail((SIDE, SIDE))
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=70)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def class_names(
    num_classes: int | None, label_names: Any = None, folders: Mapping[str, int] | None = None
) -> dict[int, str]:
    """Names of classes by their numbers: the model's own, timm's for an ImageNet of this size, or of folders.

    A thousand classes whose folders are called otherwise are not ImageNet's.
    """
    if isinstance(label_names, list | tuple) and len(label_names) == num_classes:
        return {index: str(name) for index, name in enumerate(label_names)}
    subset = infer_imagenet_subset({"num_classes": num_classes}) if num_classes else None
    if subset is not None and are_synsets(folders or {}):
        return dict(enumerate(ImageNetInfo(subset).label_descriptions()))
    return {index: name for name, index in (folders or {}).items()}
