"""Decoding in threads with results in the order of the inputs, a bounded number of them ahead."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from fimaq.allocator import give_back

Item = TypeVar("Item")
Result = TypeVar("Result")

MOST_WORKERS = 16


def default_workers() -> int:
    """Decoding threads where the caller does not say: one per core that this process may use, 16 at most."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_WORKERS)


def map_in_order(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int, ahead: int
) -> Iterator[Result]:
    """Yield `function(item)` for each item in order, computed by `workers` threads up to `ahead` items early.

    Threads are enough because decoders and torch release the GIL, and they start at once where worker
    processes would import torch first. Closing the iterator early cancels what has not started.
    """
    source = iter(items)
    pool = ThreadPoolExecutor(max_workers=max(1, workers), thread_name_prefix="fimaq-data")
    try:
        pending: deque[Future[Result]] = deque(
            pool.submit(function, item) for item in islice(source, max(1, ahead))
        )
        while pending:
            result = pending.popleft().result()
            for item in islice(source, 1):
                pending.append(pool.submit(function, item))
            yield result
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        give_back()
