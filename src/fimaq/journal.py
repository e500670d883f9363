"""What a run tells of itself while it works: to the user, to events.jsonl and, if asked, to TensorBoard."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch

from fimaq.artifact.scalars import Scalars
from fimaq.artifact.shared_directory import SharedDirectory
from fimaq.device import peak_memory, resident_bytes
from fimaq.pace import Pace
from fimaq.progress import Facts, Silent
from fimaq.reconstruct.plan import REFRESH, SEARCH, STEPS, UnitPlan, first_steps


class Journal:
    """Keeps the time of a run's stages and passes on where it stands.

    Nothing here waits for a GPU: losses come with the reports, memory is what the allocator has counted. On a GPU
    steps are queued, so their time may be booked on the refresh that waits for them; the sum is right.
    """

    def __init__(self, display: Silent, device: torch.device, now: Callable[[], float] = time.monotonic) -> None:
        self.display, self.device, self.now = display, device, now
        self.directory: SharedDirectory | None = None
        self.scalars: Scalars | None = None
        self.began = self.marked = now()
        self.plan: Sequence[UnitPlan] = []
        self.pace = Pace()
        self.index = self.refreshes = self.told_refreshes = 0
        self.booked: dict[str, float] = {}
        """Seconds by stage that `pace` has not been told of."""
        self.met: set[float] = set()
        """Sizes of units that have made a step."""
        self.first_report: tuple[int, float] | None = None
        self.facts = Facts("preparing")
        self._show()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.scalars is not None:
            self.scalars.close()

    def keep_in(self, directory: SharedDirectory, tensorboard: bool) -> None:
        """Write into a run directory from now on."""
        self.directory = directory
        self.scalars = Scalars(directory.path) if tensorboard else None

    def note(self, text: str) -> None:
        self.display.note(text)

    def expect(self, plan: Sequence[UnitPlan]) -> None:
        """The units to come."""
        self.plan = plan

    def stage(self, name: str) -> None:
        """Something else is done from now on: range search, reconstruction, refresh, evaluation."""
        self._book()
        self.refreshes += name == REFRESH
        left, passed = self.facts.seconds_left, self.now() - self.began - self.facts.seconds
        self.facts = replace(
            self.facts, stage=name, seconds_left=None if left is None else max(0.0, left - passed)
        )
        self._show()

    def start_unit(self, index: int, name: str) -> None:
        self._book()
        # Fixing the weights of the unit before and running it once more is counted here: it recurs for each unit.
        self.booked = {SEARCH: sum(self.booked.values()) if self.facts.unit_done else 0.0}
        self.index, self.refreshes, self.told_refreshes, self.first_report = index, 0, 0, None
        self.facts = Facts(
            SEARCH,
            unit=name,
            number=index + 1,
            units=len(self.plan),
            iterations=self.plan[index].iterations,
            seconds_left=self._seconds_left(searched=False),
        )
        self._show()

    def report(self, iteration: int, loss: float) -> None:
        """Iteration `iteration` (from 0) of the unit is done, with this loss."""
        self._book()
        self._tell_pace(iteration + 1)
        now = self.now()
        self.first_report = self.first_report or (iteration, now)
        steps, seconds = iteration - self.first_report[0], now - self.first_report[1]
        rate = steps / seconds if steps > 0 and seconds > 0 else None
        self.facts = replace(self.facts, iteration=iteration + 1, loss=loss, rate=rate)
        self.facts = replace(self.facts, seconds_left=self._seconds_left(searched=True))
        self._show()
        if self.directory is not None:
            self.directory.event("progress", index=self.index, of=len(self.plan), **_fields(self.facts))
        if self.scalars is not None:
            self.scalars.loss(self.facts.unit, iteration, loss)

    def finish_unit(self, record: dict[str, Any]) -> None:
        """The unit is done; `record` is its entry of metrics.json."""
        self._book()
        if not record["losses"]:
            self.pace.spent(self.plan[self.index].search, sum(self.booked.values()))
            self.booked = {}
        self.facts = replace(self.facts, unit_done=True, seconds_left=self._seconds_left(searched=True))
        self._show()
        if self.directory is not None:
            host = peak_memory(torch.device("cpu"))
            self.directory.event("unit", index=self.index, of=len(self.plan), peak_host_bytes=host, **record)
        if self.scalars is not None:
            self.scalars.unit(self.index, record, self.facts.memory_bytes)

    def finish_units(self) -> None:
        """What follows belongs to no unit."""
        self.facts = Facts("evaluation")
        self._show()

    def finish(self, fidelity: dict[str, float]) -> None:
        if self.directory is not None:
            self.directory.event("finished", **fidelity)
        if self.scalars is not None:
            self.scalars.final(fidelity)

    def _book(self) -> None:
        """The time since the last call belongs to the stage that ends now, or goes on."""
        now = self.now()
        self.booked[self.facts.stage] = self.booked.get(self.facts.stage, 0.0) + now - self.marked
        self.marked = now

    def _tell_pace(self, iterations: int) -> None:
        """What was booked since the last report, and what was done in that time; `iterations` are done by now."""
        plan, pace, booked = self.plan[self.index], self.pace, self.booked
        first = self.first_report is None
        if first:
            pace.spent(plan.search, booked.get(SEARCH, 0.0))
        new = first and plan.size not in self.met
        steps = first_steps(1) if new else plan.steps(iterations - self.facts.iteration)
        self.met.add(plan.size)
        pace.spent(steps, booked.get(STEPS, 0.0))
        pace.spent(plan.refresh(self.refreshes - self.told_refreshes), booked.get(REFRESH, 0.0))
        self.told_refreshes = self.refreshes
        self.booked = {}

    def _seconds_left(self, searched: bool) -> float | None:
        """For the rest of this unit and all units after it."""
        now, *later = self.plan[self.index :]
        ahead = now.rest(searched, self.refreshes, self.facts.iteration if searched else 0)
        for unit in later:
            ahead += unit.rest(False, 0, 0)
        sizes = {unit.size for unit in (now, *later) if unit.iterations} - self.met
        return self.pace.seconds_for([*ahead, first_steps(len(sizes))])

    def _show(self) -> None:
        self.facts = replace(self.facts, seconds=self.now() - self.began, memory_bytes=used_memory(self.device))
        self.display.report(self.facts)


def used_memory(device: torch.device) -> int:
    """Bytes. GPU: the most that the allocator reserved so far. CPU: what the process holds in memory now."""
    if device.type == "cuda":
        return peak_memory(device)
    return resident_bytes()


def _fields(facts: Facts) -> dict[str, Any]:
    """Facts of a unit as events.jsonl has them."""
    return {
        "unit": facts.unit,
        "iteration": facts.iteration,
        "iterations": facts.iterations,
        "loss": facts.loss,
        "rate": _rounded(facts.rate),
        "seconds": _rounded(facts.seconds),
        "seconds_left": _rounded(facts.seconds_left),
        "memory_bytes": facts.memory_bytes,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
