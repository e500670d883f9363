"""The activation cache: what a unit reads and should give, for all calibration images.

Each tensor lives on the GPU while it fits there, else in pinned host memory, else in a file on disk that the
operating system pages in; `places` says which. Rows come back on the compute device whatever the place.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

GPU_SHARE = 0.6
HOST_SHARE = 0.6
"""Shares of the free memory the cache may take: the rest is for the unit at work and the suffix."""


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return 4 * 2**30
    return 4 * 2**30


class ActivationCache:
    """Named lists of tensors, each (images, ...). `folder` holds what fits nowhere else."""

    def __init__(self, count: int, device: torch.device, folder: Path | None = None) -> None:
        self.count = count
        self.device = device
        self.folder = folder
        self.places: dict[str, str] = {}
        self._tensors: dict[str, list[Tensor]] = {}
        self._files: dict[str, list[Path]] = {}

    def allocate(self, name: str, shapes: Sequence[torch.Size], dtype: torch.dtype) -> None:
        """Make room for one tensor (count, *shape) per shape, in place of what `name` held before."""
        self.drop(name)
        size = sum(self.count * shape.numel() for shape in shapes) * dtype.itemsize
        if self.device.type == "cuda" and size < GPU_SHARE * free_bytes(self.device):
            place = "GPU"
            tensors = [torch.empty(self.count, *s, dtype=dtype, device=self.device) for s in shapes]
        elif size < HOST_SHARE * free_bytes(torch.device("cpu")):
            pinned = self.device.type == "cuda"
            place = "pinned host memory" if pinned else "host memory"
            tensors = [torch.empty(self.count, *s, dtype=dtype, pin_memory=pinned) for s in shapes]
        else:
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

    def gather(self, name: str, indices: Tensor) -> list[Tensor]:
        """A copy of the rows at `indices` (on the host), on the compute device."""
        return [t.index_select(0, indices.to(t.device)).to(self.device) for t in self.stored(name)]

    def rename(self, old: str, new: str) -> None:
        self.drop(new)
        for table in (self.places, self._tensors, self._files):
            if old in table:
                table[new] = table.pop(old)  # type: ignore[index, assignment]

    def drop(self, name: str) -> None:
        self.places.pop(name, None)
        self._tensors.pop(name, None)
        for path in self._files.pop(name, []):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        for name in list(self._tensors):
            self.drop(name)

    def _on_disk(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        folder = self.folder or Path(tempfile.gettempdir())
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix="cache-", suffix=".bin", delete=False) as file:
            path = Path(file.name)
        self._files.setdefault(name, []).append(path)
        count = self.count * shape.numel()
        return torch.from_file(str(path), shared=True, size=count, dtype=dtype).view(self.count, *shape)
