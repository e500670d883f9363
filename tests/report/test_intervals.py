"""Confidence intervals against published values, and against the coverage they promise."""

from math import comb

import numpy as np
import pytest

from fimaq.report.intervals import around, paired_difference, standard_error, wilson


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_intervals_are_those_of_newcombe_1998(successes: int, count: int, low: float, high: float) -> None:
    assert wilson(successes, count) == pytest.approx((low, high), abs=5e-5)
    mirrored = wilson(count - successes, count)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_a_share_of_nothing_or_of_too_much_is_refused() -> None:
    for successes, count in ((0, 0), (3, 2), (-1, 5)):
        with pytest.raises(ValueError, match="no share"):
            wilson(successes, count)


def paired_coverage(count: int, only_first: float, only_second: float) -> float:
    """How often the interval holds the true difference, by going through every outcome."""
    covered = 0.0
    rest = 1 - only_first - only_second
    for a in range(count + 1):
        for b in range(count + 1 - a):
            chance = comb(count, a) * comb(count - a, b) * only_first**a * only_second**b * rest ** (count - a - b)
            low, high = paired_difference(a, b, count)
            covered += chance * (low <= only_second - only_first <= high)
    return covered


@pytest.mark.parametrize(("first", "second"), [(0.15, 0.05), (0.08, 0.08), (0.3, 0.1), (0.02, 0.05)])
def test_paired_intervals_hold_the_true_difference_as_often_as_they_say(first: float, second: float) -> None:
    assert 0.93 <= paired_coverage(40, first, second) <= 0.999


def test_pairs_that_agree_make_the_interval_narrow() -> None:
    low, high = paired_difference(20, 10, 1000)
    assert low < -0.01 < high
    separate = wilson(710, 1000)[1] - wilson(710, 1000)[0]
    assert high - low < separate / 2


def test_equal_models_have_an_interval_around_zero() -> None:
    low, high = paired_difference(0, 0, 100)
    assert low == -high
    assert 0 < high < 0.03


def test_the_standard_error_is_numpys() -> None:
    values = np.random.default_rng(0).exponential(size=50)
    assert standard_error(list(values)) == pytest.approx(values.std(ddof=1) / np.sqrt(50))
    assert standard_error([3.0]) == 0.0
    assert around(1.0, 0.1) == pytest.approx((0.804, 1.196), abs=1e-3)
    assert around(0.01, 0.1)[0] == 0.0
