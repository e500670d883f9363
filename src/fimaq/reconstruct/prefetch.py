"""Batches of activations that are not on the GPU, copied there while the batch before them is worked on."""

import torch
from torch import Tensor


class Prefetch:
    """Holds one batch that is in use (`batch`) and one that is on its way.

    `stored`: tensors (images, ...) in host memory or on disk, by name. Rows are copied one by one by the GPU's
    copy engine, straight from where they are; only for rows on disk does the host wait, while the GPU computes.
    """

    def __init__(self, stored: dict[str, Tensor], batch_size: int, device: torch.device) -> None:
        self.rows = [tensor.unbind() for tensor in stored.values()]
        self.batch = {name: torch.empty_like(t[:batch_size], device=device) for name, t in stored.items()}
        self._coming = [torch.empty_like(tensor) for tensor in self.batch.values()]
        self._places = [row for tensor in self._coming for row in tensor.unbind()]
        self._stream = torch.cuda.Stream(device)
        self._arrived, self._taken = torch.cuda.Event(), torch.cuda.Event()
        self._taken.record()

    def fetch(self, images: list[int]) -> None:
        """Start copying the rows of these images."""
        self._stream.wait_event(self._taken)
        with torch.cuda.stream(self._stream):
            found = [rows[image] for rows in self.rows for image in images]
            torch._foreach_copy_(self._places, found, non_blocking=True)
            self._arrived.record()

    def take(self) -> None:
        """Make what was fetched last the batch in use, as soon as it is there."""
        self._arrived.wait()
        torch._foreach_copy_(list(self.batch.values()), self._coming)
        self._taken.record()

    def close(self) -> None:
        """Wait for what is on its way, so that its memory can be given back."""
        self._stream.synchronize()
