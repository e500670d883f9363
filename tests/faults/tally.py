"""Counting what was tried and what came of it; `tests/conftest.py` prints the sum of all tests."""

from dataclasses import dataclass, field


@dataclass
class Tally:
    """Faults and inputs that one test tries. Whatever goes wrong is collected, and fails the test at its end."""

    counts: dict[str, int] = field(
        default_factory=lambda: {"faults": 0, "kills": 0, "inputs": 0, "lost": 0, "wrong": 0}
    )
    complaints: list[str] = field(default_factory=list)

    def fault(self, kill: bool = False) -> None:
        self.counts["faults"] += 1
        self.counts["kills"] += kill

    def input(self) -> None:
        self.counts["inputs"] += 1

    def expect_kept(self, kept: bool, what: str) -> None:
        """Something finished is still there, or can be had again."""
        self._judge("lost", kept, what)

    def expect_right(self, right: bool, what: str) -> None:
        """A result is correct or refused; a run that is not complete is not taken for one."""
        self._judge("wrong", right, what)

    def _judge(self, kind: str, good: bool, what: str) -> None:
        if not good:
            self.counts[kind] += 1
            self.complaints.append(f"{kind}: {what}")
