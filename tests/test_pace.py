"""Time left: from equal parts, from comparable ones, and not told where nothing comparable was measured."""

import pytest

from fimaq.pace import REACH, Pace, Part, clock


def measured(*parts: tuple[Part, float]) -> Pace:
    pace = Pace()
    for part, seconds in parts:
        pace.spent(part, seconds)
    return pace


def test_nothing_is_known_at_the_start() -> None:
    assert Pace().seconds_for([Part("steps", 1.0)]) is None


def test_nothing_left_takes_no_time() -> None:
    assert Pace().seconds_for([]) == 0
    assert Pace().seconds_for([Part("steps", 1.0, count=0)]) == 0


def test_parts_of_a_measured_size_take_what_those_took() -> None:
    pace = measured((Part("steps", 10.0, count=4), 2.0), (Part("steps", 10.0, count=6), 6.0))
    assert pace.seconds_for([Part("steps", 10.0, count=5)]) == pytest.approx(5 * 8 / 10)


def test_a_measured_size_is_not_mixed_with_others() -> None:
    pace = measured((Part("steps", 1.0), 7.0), (Part("steps", 100.0), 2.0))
    assert pace.seconds_for([Part("steps", 1.0), Part("steps", 100.0, count=3)]) == pytest.approx(7 + 6)


def test_a_new_size_takes_time_in_proportion_to_those_of_its_stage() -> None:
    pace = measured((Part("steps", 10.0), 3.0), (Part("steps", 20.0), 3.0), (Part("search", 1.0), 99.0))
    assert pace.seconds_for([Part("steps", 5.0, count=2)]) == pytest.approx(2 * 5 * 6 / 30)


def test_a_much_larger_part_is_not_guessed_from_a_small_one() -> None:
    pace = measured((Part("steps", 1.0), 1.0))
    assert pace.seconds_for([Part("steps", REACH)]) == pytest.approx(REACH)
    assert pace.seconds_for([Part("steps", REACH + 0.1)]) is None


def test_one_stage_that_is_not_known_makes_the_whole_unknown() -> None:
    pace = measured((Part("search", 1.0), 1.0))
    assert pace.seconds_for([Part("search", 1.0), Part("steps", 1.0)]) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "--"),
        (0.2, "0:00"),
        (-4.0, "0:00"),
        (59.6, "1:00"),
        (61, "1:01"),
        (3599, "59:59"),
        (7325, "2:02:05"),
    ],
)
def test_times_are_written_as_people_write_them(seconds: float | None, text: str) -> None:
    assert clock(seconds) == text
