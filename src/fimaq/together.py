"""Several processes, started by torchrun: NCCL between GPUs, gloo between CPUs.

All that is sent between ranks is sent here. Messages are tensors, and bytes of JSON and safetensors.
"""

import contextlib
import datetime
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from fimaq.errors import FimaqError, InputError
from fimaq.ranks import ALONE, Ranks, Stored
from fimaq.watch import Watch

LONGEST_WAIT = datetime.timedelta(hours=6)
"""For one message: a rank may compile or evaluate while others wait. Who is dead is seen by `watch.py`, sooner."""


@contextlib.contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """All ranks that torchrun started, or one alone where it did not. They part at the end.

    An error that several ranks meet is told by the first of them.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        yield ALONE
        return
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise InputError(f"WORLD_SIZE is set and {missing[0]} is not: start several processes with torchrun")
    watch = Watch(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    ranks = Together(watch)
    try:
        yield ranks
        ranks.part()
    except FimaqError as error:
        watch.leave(str(error))
        if watch.first_to_say(str(error)):
            raise
        sys.exit(2 if isinstance(error, InputError) else 1)
    except BaseException as error:
        watch.leave(f"{type(error).__name__} {error}")
        raise


class Together(Ranks):
    """This process among the others. They connect when the device is known (`place`)."""

    def __init__(self, watch: Watch) -> None:
        self.rank, self.size = watch.rank, watch.size
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.watch = watch

    def place(self, device: torch.device) -> torch.device:
        if device.type == "cuda":
            if self.local_rank >= torch.cuda.device_count():
                raise InputError(
                    f"rank {self.rank} is process {self.local_rank + 1} on its machine, which has "
                    f"{torch.cuda.device_count()} GPUs: start at most one process per GPU, or give --device cpu"
                )
            device = torch.device("cuda", self.local_rank)
            torch.cuda.set_device(device)
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            with self._waiting():
                dist.init_process_group(
                    backend, timeout=LONGEST_WAIT, device_id=device if device.type == "cuda" else None
                )
            self.watch.all_started = True
        return device

    def part(self) -> None:
        """Wait for all ranks to be done, and disconnect."""
        if dist.is_initialized():
            with self._waiting():
                dist.all_reduce(torch.zeros(1))
        self.watch.leave()
        if dist.is_initialized():
            dist.destroy_process_group()

    def sum_(self, *tensors: Tensor) -> None:
        self._reduce_(tensors, self._sum_)

    def largest_(self, *tensors: Tensor) -> None:
        self._reduce_(tensors, lambda bucket: dist.all_reduce(bucket, dist.ReduceOp.MAX))

    def _reduce_(self, tensors: tuple[Tensor, ...], reduce_: Callable[[Tensor], Any]) -> None:
        if not tensors:
            return
        bucket = tensors[0] if len(tensors) == 1 else torch.cat([t.flatten() for t in tensors])
        with self._waiting():
            reduce_(bucket)
        if len(tensors) > 1:
            for tensor, part in zip(tensors, bucket.split([t.numel() for t in tensors]), strict=True):
                tensor.copy_(part.view(tensor.shape))

    def _sum_(self, bucket: Tensor) -> None:
        """Add in the order of ranks, whatever order a library would take: so the bits are those of one process."""
        if self.size == 2:  # there is only one sum of two
            dist.all_reduce(bucket)
            return
        pieces = bucket.new_zeros(self.size, -(-bucket.numel() // self.size))  # each rank adds up one of them
        pieces.view(-1)[: bucket.numel()] = bucket.flatten()
        of_ranks = torch.empty_like(pieces)
        dist.all_to_all_single(of_ranks, pieces)
        total = of_ranks[0].clone()
        for piece in of_ranks[1:]:
            total += piece
        dist.all_gather_into_tensor(pieces.view(-1), total)
        bucket.copy_(pieces.view(-1)[: bucket.numel()].view(bucket.shape))

    def mean(self, values: Tensor) -> Tensor:
        sums = torch.stack(
            [values.sum(dtype=torch.float64), values.new_tensor(values.numel(), dtype=torch.float64)]
        )
        self.sum_(sums)
        return (sums[0] / sums[1]).to(values.dtype)

    def ends(self, images: Tensor) -> Tensor:
        count = torch.tensor(len(images))
        self.sum_(count)
        ends = torch.zeros_like(images[:1]).repeat(2, 1, 1, 1)
        if self.rank == 0:
            ends[0] = images[0]
        if self.rank == (int(count) - 1) % self.size:
            ends[1] = images[-1]
        self.sum_(ends)
        return ends

    def gather(self, rows: Tensor, images: range, to: int) -> Tensor:
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(rows)
        self.sum_(lengths)
        sent = [len(rows) if rank == to else 0 for rank in range(self.size)]
        coming = lengths.tolist() if self.rank == to else [0] * self.size
        received = self.exchange(rows.contiguous(), sent, coming)()
        of_one = sum(coming) // len(images)
        places = [slice((rank - images.start) % self.size, None, self.size) for rank in range(self.size)]
        if self.rank != to or coming != [len(images[place]) * of_one for place in places]:
            return received  # rows that are not of images, such as a table of positions
        whole = rows.new_empty(len(images), of_one, *rows.shape[1:])
        for place, part in zip(places, received.split(coming), strict=True):
            whole[place] = part.view(whole[place].shape)
        return whole.flatten(0, 1)

    def exchange(self, rows: Tensor, sent: list[int], coming: list[int]) -> Callable[[], Tensor]:
        """Start sending `rows`, sent[r] of them to rank r. What is returned waits for coming[r] from each r."""
        received = rows.new_empty(sum(coming), *rows.shape[1:])
        with self._waiting():
            work = dist.all_to_all_single(received, rows, coming, sent, async_op=True)
            assert work is not None

        def arrived() -> Tensor:
            with self._waiting():
                work.wait()
            return received

        return arrived

    def from_rank(self, source: int, make: Callable[[], Stored]) -> Stored:
        if self.rank == source:
            try:
                tensors, value = make()
            except FimaqError as error:
                self._broadcast(source, _packed({}, {"error": str(error), "input": isinstance(error, InputError)}))
                raise
            self._broadcast(source, _packed(tensors, {"value": value}))
            return tensors, value
        tensors, message = _unpacked(self._broadcast(source, b""))
        if "error" in message:
            raise (InputError if message["input"] else FimaqError)(message["error"])
        return tensors, message["value"]

    def collect(self, value: Any) -> list[Any]:
        return [self.from_rank(rank, lambda: ({}, value))[1] for rank in range(self.size)]

    def _broadcast(self, source: int, content: bytes) -> bytes:
        length = torch.tensor(len(content))
        with self._waiting():
            dist.broadcast(length, source)
            message = torch.empty(int(length), dtype=torch.uint8)
            if self.rank == source:
                message = torch.frombuffer(bytearray(content), dtype=torch.uint8)
            dist.broadcast(message, source)
        return message.numpy().tobytes()

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """A message that fails means that a rank is gone; which one is found out before it is reported."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise FimaqError(self.watch.who_is_gone(error)) from None


def _packed(tensors: dict[str, Tensor], message: dict[str, Any]) -> bytes:
    head = json.dumps(message).encode()
    separate = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    return len(head).to_bytes(8) + head + save(separate)


def _unpacked(content: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    length = int.from_bytes(content[:8])
    return load(content[8 + length :]), json.loads(content[8 : 8 + length])
