"""The activation cache: what a unit reads and should give, for all calibration images.

Each list of tensors lives on the GPU while it fits there, else in pinned host memory, else in a file on disk that
the operating system pages in; `places` says which. Rows come back on the compute device whatever the place.
"""

import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fimaq.errors import FimaqError
from fimaq.ranks import ALONE, Ranks
from fimaq.reconstruct.memory import SHARE, free_bytes

FREE_SHARE = 0.6
"""Of the free memory in a place, the largest part that one list of tensors may take."""

GPU, PINNED, HOST, DISK = "GPU", "pinned host memory", "host memory", "disk"


class ActivationCache:
    """Named lists of tensors, each (images, ...): of `count` images, those that live on this rank.

    `folder` holds what fits nowhere else; `budget` bounds all memory of the compute device, `host_room` what
    lists take of the host's memory beside a GPU, in bytes.
    """

    def __init__(
        self,
        count: int,
        device: torch.device,
        folder: Path | None = None,
        budget: int | None = None,
        host_room: int | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.count = count
        self.ranks = ranks
        self.held = ranks.share(count)
        self.device = device
        self.folder = folder
        self.limit = torch.inf if budget is None else SHARE * budget
        self.host_limit = torch.inf if host_room is None else host_room
        self.places: dict[str, str] = {}
        self._tensors: dict[str, list[Tensor]] = {}
        self._files: dict[str, list[Path]] = {}
        self._mapped: dict[str, list[mmap.mmap]] = {}

    def allocate(self, name: str, rows: Sequence[Tensor], count: int | None = None) -> None:
        """Make room for one tensor of all images per tensor in `rows`, in place of what `name` held before.

        `count`: of the first so many images, if not of all.
        """
        self.drop(name)
        images = self.held if count is None else self.ranks.share(count)
        kinds = [(torch.Size([images, *r.shape[1:]]), r.dtype) for r in rows]
        size = sum(shape.numel() * dtype.itemsize for shape, dtype in kinds)
        for place in self.places_for(size):
            tensors = self._in_memory(place, kinds)
            if tensors is not None:
                break
        else:
            place = DISK
            tensors = [self._on_disk(name, *kind) for kind in kinds]
        self.places[name] = place
        self._tensors[name] = tensors

    def places_for(self, size: int) -> Iterator[str]:
        """Where in memory one more list of `size` bytes may go, the best place first; else it goes to disk."""
        places = (GPU, PINNED) if self.device.type == "cuda" else (HOST,)
        return (place for place in places if self._fits(place, size))

    def write(self, name: str, start: int, rows: Sequence[Tensor], count: int | None = None) -> None:
        """Store rows for the images from `start` on, allocating on the first write (`count` as there)."""
        if name not in self._tensors:
            self.allocate(name, rows, count)
        for stored, new in zip(self._tensors[name], rows, strict=True):
            stored[start : start + len(new)].copy_(new)
        self.leave_pages()

    def rows(self, name: str, start: int, stop: int) -> list[Tensor]:
        """A copy of consecutive rows, on the compute device."""
        copies = [t[start:stop].to(self.device, copy=True) for t in self._tensors[name]]
        self.leave_pages()
        return copies

    def leave_pages(self) -> None:
        """Give the system back what was read or written of files: no content is lost, and it can be read again.

        Else the whole of every file would count as memory of this process after a while.
        """
        if hasattr(mmap, "MADV_DONTNEED"):
            for mapped in chain(*self._mapped.values()):
                mapped.madvise(mmap.MADV_DONTNEED)

    def stored(self, name: str) -> list[Tensor]:
        """The tensors themselves, wherever they are; none for a name that was never written."""
        return self._tensors.get(name, [])

    def rename(self, old: str, new: str) -> None:
        self.drop(new)
        for table in (self.places, self._tensors, self._files, self._mapped):
            if old in table:
                table[new] = table.pop(old)  # type: ignore[index, assignment]

    def drop(self, name: str) -> None:
        place = self.places.pop(name, None)
        self._tensors.pop(name, None)
        self._mapped.pop(name, None)
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
        wanted = _pinned_bytes(size) if place == PINNED else size
        limit = self.host_limit if place == PINNED else self.limit
        sharing = 1 if place == GPU else self.ranks.neighbours
        return self.taken(place) + wanted <= limit and wanted < FREE_SHARE * self.free(place) / sharing

    def taken(self, place: str) -> int:
        """Bytes of memory that all lists take in a place."""
        bytes_of = _pinned_bytes if place == PINNED else int
        return sum(bytes_of(t.nbytes) for n, ts in self._tensors.items() for t in ts if self.places[n] == place)

    def free(self, place: str) -> int:
        """Bytes of memory that nothing uses in a place."""
        return free_bytes(self.device if place == GPU else torch.device("cpu"))

    def _in_memory(self, place: str, kinds: Sequence[tuple[torch.Size, torch.dtype]]) -> list[Tensor] | None:
        """None where there is less room than it seemed: others use the same memory, and it may be in pieces."""
        where: dict[str, Any] = {"device": self.device} if place == GPU else {"pin_memory": place == PINNED}
        try:
            return [torch.empty(shape, dtype=dtype, **where) for shape, dtype in kinds]
        except (torch.OutOfMemoryError, MemoryError):
            return None
        except RuntimeError as error:  # what the host's allocators raise has no class of its own
            if "memory" not in str(error):
                raise
            return None

    def _on_disk(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        folder = self.folder or Path(tempfile.gettempdir())
        folder.mkdir(parents=True, exist_ok=True)
        size = max(1, shape.numel()) * dtype.itemsize
        # Named like any other file in the making: where a kill leaves it behind, resuming removes it.
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".cache-", suffix=".partial", delete=False) as file:
            path = Path(file.name)
            self._files.setdefault(name, []).append(path)
            try:  # now, since a full disk that is noticed later, through the mapping, ends the process
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                self.drop(name)
                raise FimaqError(f"activations do not fit on disk in {folder}: {error.strerror}") from error
            mapped = mmap.mmap(file.fileno(), size)
        self._mapped.setdefault(name, []).append(mapped)
        return torch.frombuffer(mapped, dtype=dtype)[: shape.numel()].view(shape)


def _pinned_bytes(size: int) -> int:
    """What PyTorch takes of the host for a pinned tensor of `size` bytes: the next power of two."""
    return 1 << max(0, size - 1).bit_length()
