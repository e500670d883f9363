"""Heat maps and curves: what their pixels say about the numbers."""

import numpy as np
import pytest
from PIL import Image

from fimaq.report.heatmap import DECADES, INKS, SIDE, colours, curves, heat_maps, shares_of_scale


def lightness(rgb: np.ndarray) -> np.ndarray:
    return rgb.astype(float) @ np.array([0.2126, 0.7152, 0.0722])


def cells(picture: Image.Image, size: int) -> np.ndarray:
    """The first panel's entries: the lower left square of the picture, one pixel of each."""
    pixels, times = np.asarray(picture), SIDE // size
    start = pixels.shape[0] - 24 - size * times
    return pixels[start + times // 2 : start + size * times : times, 24 + times // 2 : 24 + size * times : times]


def places(picture: Image.Image, ink: tuple[int, int, int]) -> np.ndarray:
    """(row, column) of every pixel of this colour."""
    return np.argwhere((np.asarray(picture) == ink).all(-1))


def test_colours_grow_lighter_with_the_value() -> None:
    assert (np.diff(lightness(colours(np.linspace(0, 1, 64)))) > 0).all()


def test_what_is_off_the_scale_takes_its_end() -> None:
    assert np.array_equal(colours(np.array([-1.0, 2.0])), colours(np.array([0.0, 1.0])))


def test_a_logarithmic_scale_gives_decades_equal_steps() -> None:
    magnitudes = 10.0 ** -np.arange(DECADES + 2)
    expected = [*np.linspace(1, 0, int(DECADES) + 1), 0]
    assert shares_of_scale(magnitudes, 1.0, log=True) == pytest.approx(expected)


def test_a_linear_scale_starts_at_zero() -> None:
    assert shares_of_scale(np.array([0.0, 1.0, 4.0]), 4.0, log=False) == pytest.approx([0, 0.25, 1])


def test_entries_are_where_the_matrix_has_them() -> None:
    matrix = np.arange(1.0, 17.0).reshape(4, 4)
    shown = cells(heat_maps({"a": matrix}, "title", log=False), 4)
    assert np.array_equal(shown, colours(matrix / 16))


def test_signs_do_not_show() -> None:
    matrix = np.random.default_rng(0).normal(size=(4, 4))
    assert heat_maps({"a": matrix}, "").tobytes() == heat_maps({"a": -matrix}, "").tobytes()


def test_panels_share_one_scale() -> None:
    small = heat_maps({"a": np.full((4, 4), 1.0), "b": np.full((4, 4), 10.0)}, "")
    assert np.array_equal(cells(small, 4)[0, 0], colours(np.array(1 - 1 / DECADES)))


@pytest.mark.parametrize("matrix", [np.zeros((4, 4)), np.full((4, 4), np.nan)], ids=["zeros", "not numbers"])
@pytest.mark.parametrize("log", [True, False])
def test_nothing_to_show_is_dark(matrix: np.ndarray, log: bool) -> None:
    assert (cells(heat_maps({"a": matrix}, "", log), 4) == colours(np.array(0.0))).all()


def test_a_value_that_is_not_a_number_leaves_the_others_as_they_are() -> None:
    matrix = np.ones((4, 4))
    matrix[0, 0] = np.inf
    assert (cells(heat_maps({"a": matrix}, ""), 4) == colours(np.array(1.0))).all()


def test_a_large_matrix_is_shown_entry_by_entry() -> None:
    picture = heat_maps({"a": np.ones((SIDE + 10, SIDE + 10))}, "")
    assert picture.height > SIDE + 10


def test_captions_and_titles_are_drawn_in_full() -> None:
    short, long = (heat_maps({"a": np.ones((4, 4))}, "word " * n) for n in (2, 200))
    assert long.width > short.width
    assert heat_maps({"b": np.ones((4, 4))}, "").tobytes() != heat_maps({"a": np.ones((4, 4))}, "").tobytes()


def test_a_falling_curve_falls() -> None:
    pixels = places(curves({"a": [1.0, 0.5, 0.1]}, "title", "rank", "error"), INKS[0])
    pixels = pixels[pixels[:, 1] < 600]  # without the legend
    first, last = pixels[pixels[:, 1].argmin()], pixels[pixels[:, 1].argmax()]
    assert last[0] > first[0] + 200


def test_each_curve_has_its_own_colour() -> None:
    picture = curves({str(n): [0.1 * n, 0.1 * n + 0.05] for n in range(len(INKS))}, "", "", "")
    assert all(len(places(picture, ink)) for ink in INKS)


def test_a_single_point_is_a_curve() -> None:
    assert len(places(curves({"a": [0.5]}, "", "", ""), INKS[0])) > 10


def test_points_that_are_not_numbers_are_left_out() -> None:
    assert len(places(curves({"a": [0.5, float("nan"), 0.2]}, "", "", ""), INKS[0])) > 10
