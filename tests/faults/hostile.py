"""Hostile values for property-based tests, and the bounds within which they have to be refused.

`FIMAQ_EXAMPLES=500` tries that many inputs in each test, new ones every time; by default a few, always the same.
"""

import copy
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("FIMAQ_EXAMPLES", "0"))
SECONDS = 20
SPARE_MEMORY = 4 * 2**30

NASTY_TEXTS = (
    "", "..", "../../outside", "/dev/zero", "/", "~", "a\0b", "a\nb", "\u202e", "\U0001f4a3", "x" * 5000, "null",
    "1e999", "nan", "-1", "0x_", "2020-13-45", "9" * 400 + "GiB", "hf-hub:", "cuda:99", "mask_rcnn_swin_t", "w9a9",
    "%s%n{0}",
)  # fmt: skip
NASTY_NUMBERS = (0, -1, 1, 2**31, 2**63, 2**64, 10**30, 10**400, 1e308, -0.0, 1e-320)

TEXTS = st.sampled_from(NASTY_TEXTS) | st.text(max_size=20)
NUMBERS = st.sampled_from(NASTY_NUMBERS) | st.integers() | st.floats()
PLAIN = st.none() | st.booleans() | NUMBERS | TEXTS
VALUES = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=6
)


def inputs(few: int) -> settings:
    """How a test tries its inputs: `few` of them unless the environment asks for another number."""
    return settings(
        max_examples=EXAMPLES or few,
        derandomize=not EXAMPLES,
        phases=(Phase.explicit, Phase.generate),  # an input that takes long to fail takes forever to shrink
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@st.composite
def changed(draw: st.DrawFn, good: Any) -> Any:
    """JSON-like `good` with one to three of its values replaced, removed, or given another name."""
    value = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(value))
        if not places:
            return draw(VALUES)
        holder, key = draw(st.sampled_from(places))
        action = draw(st.sampled_from(("replace", "replace", "replace", "remove", "rename")))
        if action == "replace":
            holder[key] = draw(VALUES)
        elif action == "remove" or isinstance(holder, list):
            del holder[key]
        else:
            holder[draw(TEXTS)] = holder.pop(key)
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from _places(inner)


@st.composite
def spoiled(draw: st.DrawFn, good: bytes) -> bytes:
    """`good` with a few bytes changed, cut out or put in, mostly near its beginning, where headers are."""
    content = bytearray(good)
    for _ in range(draw(st.integers(1, 4))):
        reach = draw(st.sampled_from((16, 64, 256, len(good))))
        at = draw(st.integers(0, max(0, min(reach, len(content)) - 1)))
        action = draw(st.sampled_from(("change", "change", "cut", "insert", "end")))
        if action == "change":
            content[at : at + 1] = bytes([draw(st.integers(0, 255))])
        elif action == "cut":
            del content[at : at + draw(st.integers(1, 64))]
        elif action == "insert":
            content[at:at] = draw(st.binary(max_size=16))
        else:
            del content[at:]
    return bytes(content)


class TooSlow(BaseException):
    """What was read took longer than any honest file of its size; no `except Exception` hides it."""


@contextmanager
def bounds() -> Iterator[None]:
    """Not for long, and not with much memory: otherwise TooSlow or MemoryError."""

    def late(*_: object) -> None:
        raise TooSlow

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + SPARE_MEMORY, before[1]))
    alarm = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, alarm)
        resource.setrlimit(resource.RLIMIT_AS, before)


def names_below(folder: Path) -> set[str]:
    """Everything there is below a folder: nothing may be added to it by reading."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}
