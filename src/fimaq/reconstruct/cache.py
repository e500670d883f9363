"""The activation cache: what a unit reads and should give, for all calibration images.

Each list of tensors lives on the GPU while it fits there, else in pinned host memory, else in a file on disk that
the operating system pages in; `places` says which. Rows come back on the compute device whatever the place.
"""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fimaq.errors import FimaqError
from fimaq.ranks import ALONE, Ranks
from fimaq.reconstruct.memory import SHARE, free_bytes

FREE_SHARE = 0.6
"""Of the free memory in a place, the largest part that one list of tensors may take."""

PINNED = "pinned host memory"


class ActivationCache:
    """Named lists of tensors, each (images, ...): of `count` images, those that live on this rank.

    `folder` holds what fits nowhere else; `budget` bounds all memory of the compute device, `host_budget` what
    lists take of the host's memory beside a GPU, in bytes.
    """

    def __init__(
        self,
        count: int,
        device: torch.device,
        folder: Path | None = None,
        budget: int | None = None,
        host_budget: int | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.count = count
        self.ranks = ranks
        self.held = ranks.share(count)
        self.device = device
        self.folder = folder
        self.limit = torch.inf if budget is None else SHARE * budget
        self.host_limit = torch.inf if host_budget is None else host_budget
        self.places: dict[str, str] = {}
        self._tensors: dict[str, list[Tensor]] = {}
        self._files: dict[str, list[Path]] = {}

    def allocate(self, name: str, shapes: Sequence[torch.Size], dtype: torch.dtype) -> None:
        """Make room for one tensor (count, *shape) per shape, in place of what `name` held before."""
        self.drop(name)
        size = sum(self.held * shape.numel() for shape in shapes) * dtype.itemsize
        on_gpu = self.device.type == "cuda"
        host = PINNED if on_gpu else "host memory"
        tensors: list[Tensor] | None = None
        if on_gpu and self._fits(place := "GPU", size):
            tensors = self._in_memory(shapes, dtype, device=self.device)
        if tensors is None and self._fits(place := host, size):
            tensors = self._in_memory(shapes, dtype, pin_memory=on_gpu)
        if tensors is None:
            place = "disk"
            tensors = [self._on_disk(name, s, dtype) for s in shapes]
        self.places[name] = place
        self._tensors[name] = tensors

    def write(self, name: str, start: int, rows: Sequence[Tensor]) -> None:
        """Store rows for the images from `start` on, allocating on the first write."""
        if name not in self._tensors:
            self.allocate(name, [r.shape[1:] for r in rows], rows[0].dtype)
        for stored, new in zip(self._tensors[name], rows, strict=True):
            stored[start : start + len(new)].copy_(new)

    def rows(self, name: str, start: int, stop: int) -> list[Tensor]:
        """A copy of consecutive rows, on the compute device."""
        return [t[start:stop].to(self.device, copy=True) for t in self._tensors[name]]

    def stored(self, name: str) -> list[Tensor]:
        """The tensors themselves, wherever they are; none for a name that was never written."""
        return self._tensors.get(name, [])

    def rename(self, old: str, new: str) -> None:
        self.drop(new)
        for table in (self.places, self._tensors, self._files):
            if old in table:
                table[new] = table.pop(old)  # type: ignore[index, assignment]

    def drop(self, name: str) -> None:
        place = self.places.pop(name, None)
        self._tensors.pop(name, None)
        if place == PINNED:
            # PyTorch keeps pinned memory for tensors of the same size, which do not come: units grow smaller.
            torch._C._host_emptyCache()
        for path in self._files.pop(name, []):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        for name in list(self._tensors):
            self.drop(name)

    def _fits(self, place: str, size: int) -> bool:
        """Whether one more list of `size` bytes may be held there."""
        taken = _pinned_bytes if place == PINNED else int
        held = sum(taken(t.nbytes) for n, ts in self._tensors.items() for t in ts if self.places[n] == place)
        free = free_bytes(self.device if place == "GPU" else torch.device("cpu"))
        limit = self.host_limit if place == PINNED else self.limit
        sharing = 1 if place == "GPU" else self.ranks.neighbours
        return held + taken(size) <= limit and taken(size) < FREE_SHARE * free / sharing

    def _in_memory(self, shapes: Sequence[torch.Size], dtype: torch.dtype, **where: Any) -> list[Tensor] | None:
        """None where there is less room than it seemed: others use the same memory, and it may be in pieces."""
        try:
            return [torch.empty(self.held, *s, dtype=dtype, **where) for s in shapes]
        except (torch.OutOfMemoryError, MemoryError):
            return None
        except RuntimeError as error:  # what the host's allocators raise has no class of its own
            if "memory" not in str(error):
                raise
            return None

    def _on_disk(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        folder = self.folder or Path(tempfile.gettempdir())
        folder.mkdir(parents=True, exist_ok=True)
        count = self.held * shape.numel()
        # Named like any other file in the making: where a kill leaves it behind, resuming removes it.
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".cache-", suffix=".partial", delete=False) as file:
            path = Path(file.name)
            self._files.setdefault(name, []).append(path)
            try:  # now, since a full disk that is noticed later, through the mapping, ends the process
                os.posix_fallocate(file.fileno(), 0, max(1, count * dtype.itemsize))
            except OSError as error:
                self.drop(name)
                raise FimaqError(f"activations do not fit on disk in {folder}: {error.strerror}") from error
        return torch.from_file(str(path), shared=True, size=count, dtype=dtype).view(self.held, *shape)


def _pinned_bytes(size: int) -> int:
    """What PyTorch takes of the host for a pinned tensor of `size` bytes: the next power of two."""
    return 1 << max(0, size - 1).bit_length()
