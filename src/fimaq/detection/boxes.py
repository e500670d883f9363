"""Boxes and the deltas that move them, as MMDetection's DeltaXYWHBBoxCoder defines them.

A box is (x1, y1, x2, y2) in pixels of the network's input, its width x2 - x1. A delta (dx, dy, dw, dh) moves the
centre by parts of the width and height, and scales these by exp(dw), exp(dh).
"""

import math

import torch
from torch import Tensor

Numbers4 = tuple[float, float, float, float]

NO_STDS: Numbers4 = (1.0, 1.0, 1.0, 1.0)
NO_MEANS: Numbers4 = (0.0, 0.0, 0.0, 0.0)
LARGEST_LOG_RATIO = abs(math.log(16 / 1000))


def encode(boxes: Tensor, targets: Tensor, stds: Numbers4 = NO_STDS, means: Numbers4 = NO_MEANS) -> Tensor:
    """The deltas that move `boxes` to `targets`: (n, 4), (n, 4) -> (n, 4)."""
    centres, sizes = _centres_and_sizes(boxes)
    target_centres, target_sizes = _centres_and_sizes(targets)
    shifts = (target_centres - centres) / sizes
    deltas = torch.cat([shifts, (target_sizes / sizes).log()], dim=-1)
    return (deltas - deltas.new_tensor(means)) / deltas.new_tensor(stds)


def decode(
    boxes: Tensor,
    deltas: Tensor,
    image_size: tuple[int, int] | None = None,
    stds: Numbers4 = NO_STDS,
    means: Numbers4 = NO_MEANS,
) -> Tensor:
    """`boxes` moved by `deltas`, clipped to an image of `image_size` (height, width) where one is given.

    (n, 4), (n, 4 * classes) -> (n, 4 * classes): each box is moved once per class; classes is 1 where the
    deltas are class-agnostic.
    """
    per_class = deltas.unflatten(1, (-1, 4)) * deltas.new_tensor(stds) + deltas.new_tensor(means)
    centres, sizes = _centres_and_sizes(boxes[:, None])
    centres = centres + sizes * per_class[..., :2]
    sizes = sizes * per_class[..., 2:].clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
    moved = torch.cat([centres - sizes * 0.5, centres + sizes * 0.5], dim=-1)
    if image_size is not None:
        moved = clip(moved, image_size)
    return moved.flatten(1)


def clip(boxes: Tensor, image_size: tuple[int, int]) -> Tensor:
    """Boxes (..., 4) cut off at the borders of an image (height, width)."""
    height, width = image_size
    return boxes.clamp(min=0).minimum(boxes.new_tensor([width, height, width, height]))


def with_image_index(boxes: list[Tensor]) -> Tensor:
    """One list of regions for all images: n tensors (k_i, 4) -> (sum k_i, 5), the image's index first."""
    indexed = [torch.cat([b.new_full((len(b), 1), index), b], dim=1) for index, b in enumerate(boxes)]
    return torch.cat(indexed)


def _centres_and_sizes(boxes: Tensor) -> tuple[Tensor, Tensor]:
    """(..., 4) -> centres (..., 2) and sizes (..., 2), x first."""
    return (boxes[..., :2] + boxes[..., 2:]) * 0.5, boxes[..., 2:] - boxes[..., :2]
