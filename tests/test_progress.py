"""What a user sees: plain lines without a terminal, a view that fits narrow terminals with one."""

import io
import re

import pytest
from rich.console import Console

from fimaq.progress import Facts, Lines, View

WORKING = Facts(
    "reconstruction",
    seconds=65.0,
    memory_bytes=3 * 2**29,
    unit="stages.2.blocks.17",
    number=12,
    units=30,
    iteration=12000,
    iterations=20000,
    loss=0.43127,
    rate=1780.4,
    seconds_left=3723.0,
)


class Time:
    """A clock that goes only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def lines_of(shown: Lines) -> list[str]:
    assert isinstance(shown.stream, io.StringIO)
    return shown.stream.getvalue().splitlines()


def test_a_line_carries_all_facts() -> None:
    time = Time()
    shown = Lines(io.StringIO(), time)
    time.now += 11
    shown.report(WORKING)
    assert lines_of(shown) == [
        "unit 12/30 stages.2.blocks.17: reconstruction, iteration 12000/20000, loss 0.4313, 1780 it/s, "
        "1:02:03 left, 1:05 elapsed, 1.50 GiB"
    ]


def test_what_is_not_known_is_shown_as_such() -> None:
    time = Time()
    shown = Lines(io.StringIO(), time)
    time.now += 11
    shown.report(Facts("range search", unit="head", number=1, units=1, iterations=5))
    assert "loss --, -- it/s, -- left" in lines_of(shown)[0]


def test_lines_come_ten_seconds_apart_and_once_more_for_each_unit() -> None:
    time = Time()
    shown = Lines(io.StringIO(), time)
    for second in range(95):
        time.now += 1
        shown.report(WORKING if second != 94 else Facts("", unit="b", unit_done=True))
    assert len(lines_of(shown)) == 9 + 1
    assert "b: done" in lines_of(shown)[-1]


def test_other_work_is_announced_and_counted() -> None:
    time = Time()
    shown = Lines(io.StringIO(), time)
    shown.start("evaluating", 100)
    for done, seconds in ((10, 4), (20, 8), (100, 20)):
        time.now += seconds
        shown.update(done)
    assert lines_of(shown) == ["evaluating", "evaluating: 20/100 0:48 left", "evaluating: 100/100 0:00 left"]


def rendered(width: int, view: View) -> list[str]:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, record=True)
    console.print(view.shown())
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [80, 60])
def test_the_view_is_four_lines_that_fit(width: int) -> None:
    view = View(Console(file=io.StringIO()), Time())
    view.report(WORKING)
    rows = rendered(width, view)
    assert rows[0].split() == ["unit", "12/30", "stages.2.blocks.17", "reconstruction"]
    assert re.fullmatch("[━╸╺]+ *", rows[1])
    assert rows[2].rstrip() == "iteration 12000/20000  loss 0.4313  1780 it/s"
    assert rows[3].rstrip() == "1:02:03 left  1:05 elapsed  1.50 GiB"
    assert len(rows) == 4
    assert max(map(len, rows)) <= width


def test_a_long_name_is_cut_and_not_wrapped() -> None:
    view = View(Console(file=io.StringIO()), Time())
    view.report(Facts("reconstruction", unit="backbone." * 12, number=1, units=2, iterations=9))
    rows = rendered(60, view)
    assert len(rows) == 4
    assert rows[0].endswith("…")


def test_the_clocks_of_the_view_go_on_between_reports() -> None:
    time = Time()
    view = View(Console(file=io.StringIO()), time)
    view.report(WORKING)
    time.now += 10
    assert rendered(80, view)[3].startswith("1:01:53 left  1:15 elapsed")


def test_finished_work_leaves_the_view() -> None:
    view = View(Console(file=io.StringIO()), Time())
    view.start("evaluating", 4)
    view.update(2, "of them right")
    assert rendered(60, view)[2].startswith("2/4  of them right")
    view.update(4)
    assert rendered(60, view) == []


def test_a_terminal_gets_the_view_and_its_notes() -> None:
    """Through rich's own live display, into a console that records what it was sent."""
    console = Console(file=io.StringIO(), force_terminal=True, width=60, record=True)
    with View(console, Time()) as view:
        view.note("8 units [of 8]")
        view.report(WORKING)
        view.live.refresh()
    text = console.export_text()
    assert "8 units [of 8]" in text
    assert "1780 it/s" in text
