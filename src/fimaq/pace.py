"""How long a run will still take, from how long its parts have taken so far.

A run is made of parts: range search, refreshes and steps of every unit. Their cost is measured by stage and size.
Parts of a size not met yet borrow the pace of their stage, but only from parts that are not much smaller: there a
fixed overhead counts most, and would be multiplied. What nothing is known of is not guessed.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

REACH = 4.0
"""How many times larger than what was measured a part may be for its time to be told."""


@dataclass(frozen=True)
class Part:
    """`count` equal pieces of a run. `size`: of one, in any unit that suits the stage; only proportions count."""

    stage: str
    size: float
    count: int = 1


class Pace:
    """Seconds and counts of the parts done so far, by stage and size."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, float], float] = defaultdict(float)
        self._counts: dict[tuple[str, float], int] = defaultdict(int)

    def spent(self, part: Part, seconds: float) -> None:
        """`part` was done, and took so long."""
        if part.count > 0:
            self._seconds[part.stage, part.size] += seconds
            self._counts[part.stage, part.size] += part.count

    def seconds_for(self, parts: Iterable[Part]) -> float | None:
        """How long these parts should take together; None where that cannot be told yet."""
        each = [self._seconds_for_one(part) * part.count for part in parts if part.count > 0]
        total = sum(each)
        return None if total == float("inf") else total

    def _seconds_for_one(self, part: Part) -> float:
        """Infinity where nothing comparable was measured."""
        same = self._counts.get((part.stage, part.size))
        if same:
            return self._seconds[part.stage, part.size] / same
        near = [key for key in self._counts if key[0] == part.stage and part.size <= REACH * key[1]]
        work = sum(self._counts[key] * key[1] for key in near)
        return part.size * sum(self._seconds[key] for key in near) / work if near else float("inf")


def clock(seconds: float | None) -> str:
    """Hours, minutes and seconds as people write them; -- for what is not known."""
    if seconds is None:
        return "--"
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
