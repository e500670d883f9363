"""The cells of a suite in several processes of this machine, each cell in one of its own."""

import os
import signal
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from threading import Thread
from typing import Any

import torch

from fimaq.compare.runner import RunCell, Waiting, Work, run_cell
from fimaq.compare.summary import CellResult
from fimaq.progress import Silent


def in_processes(run: RunCell, at_once: int) -> Work:
    """Run `at_once` cells at a time. A process that dies is a cell that failed. `run`: of an installed module."""

    def work(waiting: Sequence[Waiting], progress: Silent) -> Iterator[CellResult]:
        context, left = get_context("spawn"), deque(waiting)
        running: dict[Connection, tuple[Waiting, Any]] = {}
        threads = max(1, torch.get_num_threads() // at_once)
        try:
            while left or running:
                while left and len(running) < at_once:
                    one = left.popleft()
                    progress.note(f"{one.title}: {one.cell.name}")
                    ours, theirs = context.Pipe(duplex=False)
                    process = context.Process(target=_run, args=(theirs, one, run, threads))
                    process.start()
                    theirs.close()  # so that ours ends when the process does
                    running[ours] = one, process
                for ended in wait(list(running)):
                    assert isinstance(ended, Connection)
                    yield _received(ended, *running.pop(ended))
        finally:
            for _, process in running.values():
                process.terminate()
            for _, process in running.values():
                process.join()

    return work


def _run(answer: Connection, one: Waiting, run: RunCell, threads: int) -> None:
    """In the process of a cell. It ends with its parent; Ctrl-C is the parent's to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    answer.send(run_cell(one, run, Silent()))


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)  # finished units are on disk, as after any other kill


def _received(answer: Connection, one: Waiting, process: Any) -> CellResult:
    try:
        result: CellResult = answer.recv()
    except (EOFError, OSError):  # nothing, or only a part, was sent
        process.join()
        reason = f"its process ended with exit code {process.exitcode}, perhaps for want of memory"
        result = CellResult(one.cell.name, one.cell.labels, error=reason)
    process.join()
    answer.close()
    return result
