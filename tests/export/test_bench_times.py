"""Times of two files are medians of turns in which both ran, and say which is faster."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from fimaq.export import bench
from fimaq.progress import Silent


class Clock:
    """Time passes in sessions alone, as many seconds at each call as they are given."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def session(self, name: str, seconds: Iterable[float]) -> Any:
        left = iter(seconds)

        def run(images: Tensor) -> None:
            assert images.shape == (16, 3, 8, 8)
            self.calls.append(name)
            self.now += next(left)

        return run


def test_two_turns_warm_up_and_the_others_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    sessions = {"a": clock.session("a", [90, 80, 4, 5, 6]), "b": clock.session("b", [70, 60, 1, 2, 3])}
    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock.now)
    kind: Any = SimpleNamespace(runtime="a runtime", session=lambda path, threads, shape: sessions[path])
    files: Any = {"full_precision": "a", "quantized": "b"}
    assert bench._interleaved(kind, files, 16, [3, 8, 8], 1, 3, Silent()) == {
        "batch": 16,
        "full_precision": {"median_ms": 5000, "quartiles_ms": [4000, 6000], "images_per_second": 3.2},
        "quantized": {"median_ms": 2000, "quartiles_ms": [1000, 3000], "images_per_second": 8.0},
        "speedup": 2.5,
    }
    assert clock.calls == ["a", "b"] * 5
