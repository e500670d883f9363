import threading
import time

import pytest

from fimaq.data.ordered import map_in_order


def test_results_keep_the_order_of_the_items_whatever_finishes_first():
    def slow_for_even(item: int) -> int:
        time.sleep(0.004 * (item % 2 == 0))
        return item * item

    assert list(map_in_order(slow_for_even, range(20), workers=4, ahead=8)) == [i * i for i in range(20)]


def test_an_iterator_that_is_left_early_stops_working():
    done: list[int] = []
    results = map_in_order(done.append, range(1000), workers=2, ahead=4)
    next(results)
    results.close()
    assert len(done) <= 6
    assert not any(thread.name.startswith("fimaq-data") for thread in threading.enumerate())


def test_an_error_reaches_the_caller():
    with pytest.raises(ZeroDivisionError):
        list(map_in_order(lambda item: 1 // item, [1, 0], workers=2, ahead=2))
