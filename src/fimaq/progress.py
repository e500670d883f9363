"""What a user sees while long work runs: a live bar in a terminal, plain lines elsewhere."""

import sys
import time
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

SECONDS_BETWEEN_LINES = 10.0


class Silent:
    """Shows nothing; also the interface the other two share."""

    def __enter__(self) -> "Silent":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def note(self, text: str) -> None:
        """Something a user should know, said once."""

    def start(self, what: str, total: int) -> None:
        """Begin a piece of work of `total` steps."""

    def update(self, done: int, detail: str = "") -> None:
        """`done` of the steps are finished."""


class Lines(Silent):
    """Plain lines: one when work starts, then at most one every few seconds."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self.what, self.total, self.began, self.last = "", 0, 0.0, 0.0

    def note(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    def start(self, what: str, total: int) -> None:
        self.what, self.total, self.began = what, total, time.monotonic()
        self.last = self.began
        self.note(what)

    def update(self, done: int, detail: str = "") -> None:
        now = time.monotonic()
        if now - self.last < SECONDS_BETWEEN_LINES and done < self.total:
            return
        self.last = now
        left = (now - self.began) / max(done, 1) * (self.total - done)
        self.note(f"{self.what}: {done}/{self.total} {detail} {_clock(left)} left".replace("  ", " "))


class Bar(Silent):
    """A live bar with what is being done, the loss and the time left."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self.task = self.bar.add_task("", total=None, detail="", visible=False)

    def __enter__(self) -> "Bar":
        self.bar.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bar.stop()

    def note(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def start(self, what: str, total: int) -> None:
        self.bar.reset(self.task, total=total, description=what, detail="", visible=True)

    def update(self, done: int, detail: str = "") -> None:
        self.bar.update(self.task, completed=done, detail=detail, visible=done < (self.bar.tasks[0].total or 0))


def for_terminal() -> Silent:
    """A bar when standard error is a terminal, plain lines otherwise."""
    return Bar() if sys.stderr.isatty() else Lines()


def _clock(seconds: float) -> str:
    return f"{int(seconds // 60)}:{int(seconds % 60):02d}"
