"""What the C library does with memory that was freed. Only glibc can be told; elsewhere nothing happens."""

import contextlib
import ctypes
from collections.abc import Iterator

TRIM_THRESHOLD, MAP_THRESHOLD = -1, -3
"""In glibc: how much may be free before some goes back; from which size on memory is new each time."""
KEPT = {MAP_THRESHOLD: 2**25, TRIM_THRESHOLD: 2**30}
"""Of the first, glibc takes no more."""
USUAL = {MAP_THRESHOLD: 2**25, TRIM_THRESHOLD: 2**26}
"""What glibc chooses by itself in any process that has freed large tensors."""


def give_back() -> None:
    """To the system: glibc keeps what ended threads have freed, a gigabyte after 16 that decoded large images."""
    with contextlib.suppress(AttributeError):  # other C libraries have no such function
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def reused() -> Iterator[None]:
    """Up to a GiB stays with this process for the next tensors: new pages take longer than much work."""
    _choose(KEPT)
    try:
        yield
    finally:
        _choose(USUAL)
        give_back()


def _choose(thresholds: dict[int, int]) -> None:
    with contextlib.suppress(AttributeError):
        choose = ctypes.CDLL(None).mallopt
        for option, size in thresholds.items():
            choose(option, size)
