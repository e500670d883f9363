"""A batch dealt out to ranks: each works on its part of the rows, wherever the images of the batch live.

The images of a batch are drawn by the same rule whatever the number of ranks, so by chance one rank holds more of
them than its part and another fewer. What is too much goes to who has too little, in one message, while the batch
before it is worked on: of 32 images about 2 for two ranks, about 6 for eight. So every step of a rank has the same
shape, which a CUDA graph needs, and no rank waits for another that has more to do.
"""

from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor

from fimaq.together import Together


def workers(images: list[int], size: int) -> list[int]:
    """Which of `size` ranks works on each image of a batch: the one it lives on while that has room."""
    room = [len(range(rank, len(images), size)) for rank in range(size)]
    chosen: list[int | None] = []
    for image in images:
        home = image % size
        chosen.append(home if room[home] > 0 else None)
        room[home] -= room[home] > 0
    free = iter([rank for rank in range(size) for _ in range(room[rank])])
    return [next(free) if rank is None else rank for rank in chosen]


def dealt(images: list[int], size: int) -> list[list[list[int]]]:
    """Where in the batch the images stand that rank `worker` gets from rank `home`: [worker][home]."""
    table: list[list[list[int]]] = [[[] for _ in range(size)] for _ in range(size)]
    for position, (image, worker) in enumerate(zip(images, workers(images, size), strict=True)):
        table[worker][image % size].append(position)
    return table


def part_of(rank: int, table: list[list[list[int]]]) -> list[int]:
    """Where in the batch each row stands that `rank` works on: its own images first, then those of others."""
    others = (positions for home, positions in enumerate(table[rank]) if home != rank)
    return [*table[rank][rank], *chain(*others)]


class Dealt:
    """This rank's part of a batch in use (`batch`, `positions`), and of one that is on its way.

    `stored`: tensors (this rank's images, ...) by name, anywhere; `batch`: the same names, (part, ...), on the
    device. `positions`: (part,) int32, where in the whole batch each row stands.
    """

    def __init__(self, stored: dict[str, Tensor], batch_size: int, device: torch.device, ranks: Together) -> None:
        self.ranks, self.stored, self.device = ranks, stored, device
        part = ranks.share(batch_size)
        self.batch = {n: torch.empty(part, *t.shape[1:], dtype=t.dtype, device=device) for n, t in stored.items()}
        self.positions = torch.zeros(part, dtype=torch.int32, device=device)
        self._own: list[int] = []
        self._places: list[int] = []
        self._arrived: Callable[[], Tensor] | None = None

    def fetch(self, images: list[int]) -> None:
        """Start sending what other ranks need of the batch of these images."""
        rank, size = self.ranks.rank, self.ranks.size
        table = dealt(images, size)
        leaving = [[] if to == rank else table[to][rank] for to in range(size)]
        coming = [[] if home == rank else table[rank][home] for home in range(size)]
        self._own = [images[p] // size for p in table[rank][rank]]
        self._places = part_of(rank, table)
        self._arrived = None
        if any(table[worker][home] for worker in range(size) for home in range(size) if worker != home):
            rows = self._rows([images[p] // size for p in chain(*leaving)])
            joined = torch.cat([_as_bytes(tensor) for tensor in rows.values()], dim=1)
            self._arrived = self.ranks.exchange(joined, [len(p) for p in leaving], [len(p) for p in coming])

    def take(self) -> None:
        """Make what was fetched last the batch in use, as soon as it is there."""
        kept = len(self._own)
        for name, rows in self._rows(self._own).items():
            self.batch[name][:kept].copy_(rows)
        self.positions.copy_(torch.tensor(self._places, dtype=torch.int32))
        if self._arrived is None:
            return
        sizes = [tensor[0].numel() * tensor.element_size() for tensor in self.batch.values()]
        for tensor, part in zip(self.batch.values(), self._arrived().split(sizes, dim=1), strict=True):
            tensor[kept:].copy_(part.contiguous().view(tensor.dtype).view(tensor[kept:].shape))

    def close(self) -> None:
        """Wait for what is on its way: every rank has to."""
        if self._arrived is not None:
            self._arrived()

    def _rows(self, images: list[int]) -> dict[str, Tensor]:
        rows = torch.tensor(images, dtype=torch.int64)
        return {n: t.index_select(0, rows.to(t.device)).to(self.device) for n, t in self.stored.items()}


def _as_bytes(rows: Tensor) -> Tensor:
    """(n, ...) -> (n, bytes of one row)."""
    return rows[:, None].flatten(1).contiguous().view(torch.uint8)
