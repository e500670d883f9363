"""The processes that quantize one model together: what each may ask of the others, and the answers of one alone.

Image i of the calibration set lives on rank i % size, so that of the first k images every rank has its share. A
process alone is rank 0 of 1: nothing is sent and nothing is copied. `together.py` holds the real thing.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Stored = tuple[dict[str, Tensor], Any]
"""Tensors by name, and something that JSON can hold."""


class Ranks:
    """One process; also the interface that several share. Every method is called by all ranks, or by none."""

    rank = 0
    size = 1
    neighbours = 1
    """Ranks on this machine, which share its memory."""

    def share(self, count: int) -> int:
        """How many of the first `count` images are this rank's: its own first ones."""
        return len(range(self.rank, count, self.size))

    def place(self, device: torch.device) -> torch.device:
        """The device this rank computes on, where `device` was asked for."""
        return device

    def sum_(self, *tensors: Tensor) -> None:
        """Add up these tensors over all ranks, in place and in one message."""

    def largest_(self, *tensors: Tensor) -> None:
        """Element by element the largest over all ranks, in place and in one message."""

    def mean(self, values: Tensor) -> Tensor:
        """The mean of all elements that all ranks have, added up in double precision: in any order the same."""
        return values.mean(dtype=torch.float64).to(values.dtype)

    def ends(self, images: Tensor) -> Tensor:
        """The first and the last image of the whole set, (2, C, H, W); `images`: this rank's."""
        return images[[0, -1]]

    def gather(self, rows: Tensor, images: range, to: int) -> Tensor:
        """What all ranks have of some images that follow each other, on rank `to`, in the order of the images.

        `rows`: (this rank's share of the images * k, ...), k for each. The other ranks get an empty tensor.
        """
        return rows

    def from_rank(self, source: int, make: Callable[[], Stored]) -> Stored:
        """What `make()` gives on rank `source`, on the CPU, for all; an error there is raised by all."""
        return make()

    def collect(self, value: Any) -> list[Any]:
        """The value (as JSON) of every rank."""
        return [value]


ALONE = Ranks()
