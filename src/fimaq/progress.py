"""What a user sees while long work runs: a live view in a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.text import Text

from fimaq.pace import clock

SECONDS_BETWEEN_LINES = 10.0
REFRESHES_PER_SECOND = 4


@dataclass(frozen=True)
class Facts:
    """Where a run stands. None: not known yet."""

    stage: str
    seconds: float = 0.0
    """Since the run began."""
    memory_bytes: int = 0
    """GPU: the most that was reserved so far; CPU: what the process holds in memory."""
    unit: str = ""
    number: int = 0
    """Of the unit in work, from 1."""
    units: int = 0
    iteration: int = 0
    """Finished iterations of the unit."""
    iterations: int = 0
    loss: float | None = None
    rate: float | None = None
    """Iterations in a second."""
    seconds_left: float | None = None
    """Until the last unit of the run is done."""
    unit_done: bool = False
    within: str = ""
    """Of what the run is a part, such as one cell of a comparison."""

    @property
    def what(self) -> str:
        unit = f"unit {self.number}/{self.units} {self.unit}" if self.unit else ""
        return ", ".join(part for part in (self.within, unit) if part)

    @property
    def steps(self) -> str:
        return f"iteration {self.iteration}/{self.iterations}" if self.iterations else ""

    @property
    def learning(self) -> list[str]:
        """Loss and rate, as text, where there are iterations."""
        if not self.iterations:
            return []
        loss = "--" if self.loss is None else f"{self.loss:.4f}"
        rate = "--" if self.rate is None else f"{self.rate:.1f}" if self.rate < 100 else f"{self.rate:.0f}"
        return [f"loss {loss}", f"{rate} it/s"]

    def times(self, since: float = 0.0) -> list[str]:
        """Time left, time taken and memory, as text, `since` seconds after these facts were gathered."""
        left = None if self.seconds_left is None else self.seconds_left - since
        memory = f"{self.memory_bytes / 2**30:.2f} GiB"
        return [f"{clock(left)} left", f"{clock(self.seconds + since)} elapsed", memory]


class Silent:
    """Shows nothing; also the interface the other two share."""

    def __enter__(self) -> "Silent":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def note(self, text: str) -> None:
        """Something a user should know, said once."""

    def start(self, what: str, total: int) -> None:
        """Begin a piece of work of `total` steps that is not part of a quantization."""

    def update(self, done: int, detail: str = "") -> None:
        """`done` of the steps are finished."""

    def report(self, facts: Facts) -> None:
        """Where a quantization stands: whenever its stage changes, and up to 25 times in a unit."""


class Lines(Silent):
    """Plain lines: one for each unit or piece of work, and in between at most one every few seconds."""

    def __init__(self, stream: TextIO | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self.stream, self.now = stream or sys.stderr, now
        self.what, self.total, self.began, self.last = "", 0, now(), now()

    def note(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    def start(self, what: str, total: int) -> None:
        self.what, self.total, self.began = what, total, self.now()
        self.last = self.began
        self.note(what)

    def update(self, done: int, detail: str = "") -> None:
        if self._due(done >= self.total):
            left = (self.last - self.began) / max(done, 1) * (self.total - done)
            self.note(f"{self.what}: {done}/{self.total} {detail} {clock(left)} left".replace("  ", " "))

    def report(self, facts: Facts) -> None:
        if self._due(facts.unit_done):
            stage = "done" if facts.unit_done else facts.stage
            parts = [stage, facts.steps, *facts.learning, *facts.times()]
            self.note(f"{facts.what}: ".removeprefix(": ") + ", ".join(part for part in parts if part))

    def _due(self, anyway: bool) -> bool:
        if not anyway and self.now() - self.last < SECONDS_BETWEEN_LINES:
            return False
        self.last = self.now()
        return True


class View(Silent):
    """A few live lines: what is being done, how far it is, loss and rate, time left and taken, memory."""

    def __init__(self, console: Console | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self.console, self.now = console or Console(stderr=True), now
        self.shown: Callable[[], RenderableType] = Group
        self.live = Live(
            console=self.console,
            get_renderable=lambda: self.shown(),
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
        )
        self.what, self.total, self.began = "", 0, now()

    def __enter__(self) -> "View":
        self.live.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.live.stop()

    def note(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def start(self, what: str, total: int) -> None:
        self.what, self.total, self.began = what, total, self.now()
        self.update(0)

    def update(self, done: int, detail: str = "") -> None:
        taken = self.now() - self.began
        left = None if done == 0 else taken / done * (self.total - done)
        words = [f"{done}/{self.total}", detail, f"{clock(left)} left", f"{clock(taken)} elapsed"]
        view = Group(_line(self.what, style="bold"), _bar(done, self.total), _line(*words))
        self.shown = Group if done >= self.total else lambda: view

    def report(self, facts: Facts) -> None:
        received = self.now()

        def view() -> RenderableType:
            """Drawn again and again: the clocks go on between two reports."""
            times = _line(*facts.times(self.now() - received))
            if not facts.unit:
                return Group(_line(facts.what, facts.stage, style="bold"), times)
            rows = [_line(facts.what, facts.stage, style="bold"), times]
            if facts.iterations:
                rows[1:1] = [_bar(facts.iteration, facts.iterations), _line(facts.steps, *facts.learning)]
            return Group(*rows)

        self.shown = view


def for_terminal() -> Silent:
    """A live view when standard error is a terminal, plain lines otherwise."""
    return View() if sys.stderr.isatty() else Lines()


def _line(*words: str, style: str = "") -> RenderableType:
    """One line of the view; too narrow a terminal cuts it instead of wrapping it."""
    return Text("  ".join(word for word in words if word), style=style, no_wrap=True, overflow="ellipsis")


def _bar(done: int, total: int) -> RenderableType:
    return Padding(ProgressBar(total=max(1, total), completed=done, width=40), 0)
