"""When a file is good enough: the line that is drawn, in whole images and products."""

from typing import Any

import pytest

from fimaq.export.verify import shortcomings


def found(same: int, count: int, itself: float, integer: int = 10, floats: int = 0) -> dict[str, Any]:
    compared = {"images": count, "same_top1": same, "same_top1_of_the_run_with_itself": itself}
    return {
        "integer_products": integer,
        "float_products": {"MatMul": floats} if floats else {},
        "agreement": {"test": compared},
    }


@pytest.mark.parametrize(
    ("itself", "fewest"),
    # wanted n - 3 sqrt(1.2 wanted (1 - wanted) n), wanted at most 0.99
    [(1000, 980), (990, 980), (900, 869), (500, 449)],
)
def test_three_standard_errors_below_what_is_wanted_are_enough(itself: int, fewest: int) -> None:
    assert shortcomings(found(fewest, 1000, itself), 10, floats_expected=False) == []
    (fault,) = shortcomings(found(fewest - 1, 1000, itself), 10, floats_expected=False)
    assert f"on {fewest - 1} of 1000 images (test), {min(0.99, itself / 1000):.1%} are expected" in fault


def test_products_that_are_not_integer_are_counted() -> None:
    assert shortcomings(found(9, 9, 9, integer=11), 10, floats_expected=False) == []
    assert shortcomings(found(9, 9, 9, integer=9), 10, floats_expected=False) == [
        "9 of 10 quantized products run in integer"
    ]
    assert shortcomings(found(9, 9, 9, floats=2), 10, floats_expected=True) == []
    assert shortcomings(found(9, 9, 9, floats=2), 10, floats_expected=False) == [
        "products in float: {'MatMul': 2}"
    ]
