"""The activation cache: what a unit reads and should give, for all calibration images.

Each list of tensors lives on the GPU while it fits there, else in pinned host memory, else in a file on disk that
the operating system pages in; `places` says which. Rows come back on the compute device whatever the place.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fimaq.reconstruct.memory import SHARE, free_bytes

FREE_SHARE = 0.6
"""Of the free memory in a place, the largest part that one list of tensors may take."""

GPU, PINNED, HOST, DISK = "GPU", "pinned host memory", "host memory", "disk"


class ActivationCache:
    """Named lists of tensors, each (images, ...).

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
    ) -> None:
        self.count = count
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
        place = self.place_for(sum(self.count * shape.numel() for shape in shapes) * dtype.itemsize)
        if place == GPU:
            tensors = [torch.empty(self.count, *s, dtype=dtype, device=self.device) for s in shapes]
        elif place == DISK:
            tensors = [self._on_disk(name, s, dtype) for s in shapes]
        else:
            tensors = [torch.empty(self.count, *s, dtype=dtype, pin_memory=place == PINNED) for s in shapes]
        self.places[name] = place
        self._tensors[name] = tensors

    def place_for(self, size: int) -> str:
        """Where one more list of `size` bytes goes."""
        on_gpu = self.device.type == "cuda"
        places = (GPU, PINNED) if on_gpu else (HOST,)
        return next((place for place in places if self._fits(place, size)), DISK)

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
        wanted = _pinned_bytes(size) if place == PINNED else size
        limit = self.host_limit if place == PINNED else self.limit
        return self.held(place) + wanted <= limit and wanted < FREE_SHARE * self.free(place)

    def held(self, place: str) -> int:
        """Bytes of memory that all lists take in a place."""
        taken = _pinned_bytes if place == PINNED else int
        return sum(taken(t.nbytes) for n, ts in self._tensors.items() for t in ts if self.places[n] == place)

    def free(self, place: str) -> int:
        """Bytes of memory that nothing uses in a place."""
        return free_bytes(self.device if place == GPU else torch.device("cpu"))

    def _on_disk(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        folder = self.folder or Path(tempfile.gettempdir())
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix="cache-", suffix=".bin", delete=False) as file:
            path = Path(file.name)
        self._files.setdefault(name, []).append(path)
        count = self.count * shape.numel()
        return torch.from_file(str(path), shared=True, size=count, dtype=dtype).view(self.count, *shape)


def _pinned_bytes(size: int) -> int:
    """What PyTorch takes of the host for a pinned tensor of `size` bytes: the next power of two."""
    return 1 << max(0, size - 1).bit_length()
