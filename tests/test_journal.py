"""A run's own account of itself, on a clock that only work moves."""

from typing import Any

import pytest
import torch

from fimaq.config import Config
from fimaq.journal import Journal
from fimaq.progress import Facts, Silent
from fimaq.reconstruct.plan import REFRESH, STEPS, UnitPlan, plan

BLOCKS = [40, 100, 100, 100, 30]
SEARCH_SECONDS, REFRESH_SECONDS, STEP_SECONDS = 0.01, 0.002, 0.001
"""For each operation, of a pretended machine."""


class Kept(Silent):
    def __init__(self) -> None:
        self.facts: list[Facts] = []

    def report(self, facts: Facts) -> None:
        self.facts.append(facts)


class Work:
    """A machine of constant speed that compiles each new size and takes some seconds from one unit to the next."""

    def __init__(self, compiling: float = 0.0, moving_on: float = 0.0) -> None:
        self.time, self.compiling, self.moving_on, self.shown = 0.0, compiling, moving_on, Kept()
        self.journal = Journal(self.shown, torch.device("cpu"), now=lambda: self.time)

    def run(self, plans: list[UnitPlan], taken: int = 0) -> None:
        """The units from `taken` on; those before are not computed again."""
        self.journal.expect(plans)
        compiled: set[float] = set()
        for index, unit in enumerate(plans[taken:], taken):
            self.journal.start_unit(index, f"unit {index}")
            self.time += SEARCH_SECONDS * unit.size
            due = {j * unit.iterations // max(1, unit.refreshes) for j in range(unit.refreshes)}
            losses = []
            if unit.iterations:
                self.journal.stage(STEPS)
            for iteration in range(unit.iterations):
                if iteration in due:
                    self.journal.stage(REFRESH)
                    self.time += REFRESH_SECONDS * unit.refresh_size
                    self.journal.stage(STEPS)
                self.time += STEP_SECONDS * unit.size
                self.time += 0.0 if unit.size in compiled else self.compiling
                compiled.add(unit.size)
                if iteration % 4 == 0 or iteration == unit.iterations - 1:
                    losses.append((iteration, 0.5))
                    self.journal.report(iteration, 0.5)
            self.journal.finish_unit({"losses": losses})
            self.time += self.moving_on if unit is not plans[-1] else 0.0


def planned(**settings: Any) -> list[UnitPlan]:
    config = Config.create(**{"iters": 40, "rank": 4, **settings})
    return plan(BLOCKS, [True] * len(BLOCKS), config)


@pytest.mark.parametrize("method", ["fima-q", "qdrop", "diag"])
def test_the_time_left_is_the_time_that_passes_until_the_end(method: str) -> None:
    """On a machine of constant speed, where units differ in size, at every moment at which it is told."""
    work = Work()
    work.run(planned(method=method))
    told = [facts for facts in work.shown.facts if facts.seconds_left is not None]
    assert len(told) > 0.8 * len(work.shown.facts)
    first_steps = STEP_SECONDS * sum(set(BLOCKS))  # which are counted twice, as a step and as a first step
    for facts in told:
        assert facts.seconds_left == pytest.approx(work.time - facts.seconds, abs=1.01 * first_steps)


def test_range_search_alone_is_told_too() -> None:
    work = Work()
    work.run(planned(method="rtn"))
    assert work.shown.facts[1].seconds_left is None
    after_first = next(facts for facts in work.shown.facts if facts.unit_done)
    assert after_first.seconds_left == pytest.approx(work.time - after_first.seconds)


def test_compilation_is_not_taken_for_the_pace_of_steps() -> None:
    """A step of a second and one of half a minute: after the first block, the other two are not compiled again."""
    work = Work(compiling=30.0)
    work.run(planned())
    end = work.time
    block = next(f for f in work.shown.facts if f.number == 3 and f.iteration == 5)
    assert block.seconds_left == pytest.approx(end - block.seconds, rel=0.05)
    assert block.rate == pytest.approx(1 / (STEP_SECONDS * 100), rel=0.01)


def test_the_time_between_units_is_counted_too() -> None:
    work = Work(moving_on=50.0)
    work.run(planned())
    facts = next(facts for facts in work.shown.facts if facts.number == 3 and facts.iteration == 5)
    assert facts.seconds_left == pytest.approx(work.time - facts.seconds, abs=0.8 * 50)  # of the two times to come


def test_a_resumed_run_compiles_again_and_tells_its_time_too() -> None:
    work = Work(compiling=30.0)
    work.run(planned(), taken=2)
    last = [facts for facts in work.shown.facts if facts.number == 3][-1]
    assert last.seconds_left == pytest.approx(work.time - last.seconds, rel=0.02)


def test_stages_and_memory_are_shown() -> None:
    work = Work()
    work.run(planned())
    stages = list(dict.fromkeys(facts.stage for facts in work.shown.facts))
    assert stages == ["preparing", "range search", STEPS, REFRESH]
    assert all(facts.memory_bytes > 10 * 2**20 for facts in work.shown.facts)
    assert work.shown.facts[-1].seconds_left == 0
