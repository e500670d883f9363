"""Calibration images handed over in Python: a tensor, a Dataset or a DataLoader, with or without labels."""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from fimaq.errors import FimaqError, InputError


def gather_images(source: Any, count: int) -> Tensor:
    """The first `count` images of `source` (all, where it has fewer) as one float tensor (n, C, H, W)."""
    images = source[:count] if isinstance(source, Tensor) else _from_iterable(source, count)
    if images.dim() != 4 or not images.is_floating_point():
        raise InputError(
            f"calibration images must be a float tensor (n, C, H, W), not {images.dtype} {tuple(images.shape)}"
        )
    if len(images) == 0:
        raise InputError("no calibration images were given")
    if not images.isfinite().all():
        raise InputError("the calibration images hold NaN or Inf")
    return images.detach().float()


def _from_iterable(source: Any, count: int) -> Tensor:
    items: Iterable[Any] = source
    if not hasattr(source, "__iter__") and hasattr(source, "__getitem__"):
        items = (source[i] for i in range(min(count, len(source))))
    parts: list[Tensor] = []
    found = 0
    for item in _naming_lost_workers(items, getattr(source, "num_workers", 0)):
        image = item[0] if isinstance(item, (tuple, list)) else item
        if not isinstance(image, Tensor):
            raise InputError(f"calibration data must yield image tensors, not {type(image).__name__}")
        parts.append(image[None] if image.dim() == 3 else image)
        found += len(parts[-1])
        if found >= count:
            break
    if not parts:
        raise InputError("no calibration images were given")
    return torch.cat(parts)[:count]


def _naming_lost_workers(items: Iterable[Any], workers: int) -> Iterator[Any]:
    """The same items. A worker that dies while it hands a batch over leaves an error that does not say so."""
    try:
        yield from items
    except (EOFError, ConnectionError, RuntimeError) as error:
        if workers == 0 or "DataLoader worker" in str(error):  # the data set's own
            raise
        what = f"{type(error).__name__} {error}".strip()
        raise FimaqError(f"a worker of the loader of the images died, or its batch was lost: {what}") from error


def tensor_fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """A digest of names, shapes, types and contents."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return f"sha256:{digest.hexdigest()}"
