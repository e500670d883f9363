"""Ways in which a file can come back from a disk, and what a run directory gives to those who read it."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import fimaq
from fimaq.artifact.run_directory import RunDirectory
from fimaq.errors import InputError

Damage = Callable[[bytes], bytes]


def damages(content: bytes, count: int, draw: random.Random) -> Iterator[tuple[str, Damage]]:
    """`count` of them, named: a bit flipped, an end cut off, a stretch of zeros, a stretch overwritten."""
    kinds = (_flip, _flip, _cut, _zeros, _noise)
    for number in range(count):
        kind = kinds[number % len(kinds)]
        at = draw.randrange(max(1, len(content)))
        yield f"{kind.__name__} at {at}", lambda c, kind=kind, at=at, seed=number: kind(c, at, seed)


def _flip(content: bytes, at: int, seed: int) -> bytes:
    changed = bytearray(content)
    if changed:
        changed[at] ^= 1 << seed % 8
    return bytes(changed)


def _cut(content: bytes, at: int, seed: int) -> bytes:
    return content[:at]


def _zeros(content: bytes, at: int, seed: int) -> bytes:
    length = min(512, len(content) - at)
    return content[:at] + bytes(length) + content[at + length :]


def _noise(content: bytes, at: int, seed: int) -> bytes:
    length = min(64, len(content) - at)
    return content[:at] + random.Random(seed).randbytes(length) + content[at + length :]


class Reading:
    """Everything that a run directory gives to a reader: config, metrics, tensors, logits of a loaded model."""

    def __init__(self, run: Path) -> None:
        directory = RunDirectory.open_existing(run)
        self.config, self.metrics = directory.config, directory.read_metrics()
        self.tensors, self.metadata = directory.read_model()
        directory.read_events()
        with torch.no_grad():
            self.logits = fimaq.load(run)(torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32))

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Reading)
        return (
            (self.config, self.metrics, self.metadata) == (other.config, other.metrics, other.metadata)
            and self.tensors.keys() == other.tensors.keys()
            and all(torch.equal(self.tensors[name], other.tensors[name]) for name in self.tensors)
            and torch.equal(self.logits, other.logits)
        )


def attempt(read: Callable[[], Any]) -> tuple[str | None, Any]:
    """The message with which reading was refused, or None; and what was read."""
    try:
        return None, read()
    except InputError as error:
        return str(error), None
