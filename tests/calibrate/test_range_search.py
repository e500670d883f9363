"""The range search against an exhaustive one, in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fimaq.calibrate import search
from fimaq.calibrate.search import in_chunks, search_range, search_scale
from fimaq.quant.fake import fake_quantize


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _gelu_with_outliers() -> Tensor:
    x = F.gelu(2 * _normal(1500))
    x[:4] = torch.tensor([9.0, 11.0, 13.0, 15.0])
    return x


KINDS = {
    "symmetric": lambda: _normal(1500),
    "heavy tails": lambda: _normal(1500) * _normal(1500).abs(),
    "softmax": lambda: (3 * _normal(50, 30)).softmax(-1).flatten(),
    "gelu with outliers": _gelu_with_outliers,
    "negative only": lambda: -_normal(1500).abs() - 0.5,
}


def _error(x: Tensor, scale: Tensor, zero_point: Tensor, levels: int) -> Tensor:
    """Squared error of x (n,) for candidates (C,), written down once more."""
    codes = torch.clamp(torch.round(x / scale[:, None]) + zero_point[:, None], 0, levels)
    return ((codes - zero_point[:, None]) * scale[:, None] - x).square().sum(1)


def _extremes(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.min().clamp_max(0), x.max().clamp_min(0)


def _smallest_error(x: Tensor, levels: int) -> float:
    """Over a dense grid of scales, and every zero point for each."""
    low, high = _extremes(x)
    zero_points = torch.arange(levels + 1, dtype=torch.float64)
    scales = (high - low) / levels * torch.linspace(0.1, 1.25, 100 if levels > 100 else 400, dtype=torch.float64)
    return min(_error(x, s.expand(levels + 1), zero_points, levels).min().item() for s in scales)


def _found(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    return search_range(*_extremes(x), levels, lambda s, z: _error(x, s, z, levels))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_the_found_range_is_nearly_the_best_there_is(kind, bits):
    x, levels = KINDS[kind](), 2**bits - 1
    scale, zero_point = _found(x, levels)
    found = _error(x, scale[None], zero_point[None], levels).item()
    assert found <= 1.05 * _smallest_error(x, levels)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_zero_points_are_integers_that_codes_can_hold(kind, bits):
    x, levels = KINDS[kind](), 2**bits - 1
    scale, zero_point = _found(x, levels)
    assert scale > 0
    assert zero_point == zero_point.round()
    assert 0 <= zero_point <= levels


def test_one_sided_values_waste_no_code_on_the_other_side():
    assert _found(KINDS["softmax"](), 15)[1] == 0
    assert _found(KINDS["negative only"](), 15)[1] == 15


def test_every_group_is_searched_on_its_own():
    x = torch.stack([0.01 * _normal(500), 10 * _normal(500).abs(), -_normal(500).abs()])
    low, high = x.amin(1).clamp_max(0), x.amax(1).clamp_min(0)

    def errors(scale: Tensor, zero_point: Tensor) -> Tensor:
        return torch.stack([_error(row, scale[:, i], zero_point[:, i], 15) for i, row in enumerate(x)], dim=1)

    scale, zero_point = search_range(low, high, 15, errors)
    assert scale.shape == zero_point.shape == (3,)
    for index, row in enumerate(x):
        alone = _found(row, 15)
        assert (scale[index], zero_point[index]) == alone


def test_an_input_that_is_always_zero_gets_a_usable_range():
    scale, zero_point = _found(torch.zeros(10, dtype=torch.float64), 15)
    assert scale > 0
    assert torch.isfinite(1 / scale)
    assert 0 <= zero_point <= 15


def test_a_candidate_without_a_number_for_an_error_is_not_chosen():
    x = _normal(200)
    scale, _ = _found(x, 15)

    def errors(s: Tensor, z: Tensor) -> Tensor:
        return torch.where(s > 0.9 * scale, torch.nan, _error(x, s, z, 15))

    assert search_range(*_extremes(x), 15, errors)[0] <= 0.9 * scale


def test_chunks_change_nothing(monkeypatch):
    x = _normal(100)
    monkeypatch.setattr(search, "CHUNK_ELEMENTS", {"cpu": 700})
    sizes = []

    def errors(scale: Tensor, zero_point: Tensor) -> Tensor:
        sizes.append(len(scale))
        return _error(x, scale, zero_point, 15)

    assert search_range(*_extremes(x), 15, in_chunks(errors, 100)) == _found(x, 15)
    assert max(sizes) == 7


def test_finer_groups_get_the_scale_they_need():
    x = _normal(4, 500) * torch.tensor([[0.4], [0.7], [1.0], [1.5]], dtype=torch.float64)
    scale, zero_point = _found(x.flatten(), 15)

    def errors(s: Tensor, z: Tensor) -> Tensor:
        return torch.stack([_error(row, s[:, i], z[:, i], 15) for i, row in enumerate(x)], dim=1)

    found = search_scale(scale, zero_point, torch.Size((4,)), errors)
    for index, row in enumerate(x):
        grid = scale * torch.linspace(0.1, 2, 400, dtype=torch.float64)
        smallest = _error(row, grid, zero_point.expand(400), 15).min()
        assert _error(row, found[index][None], zero_point[None], 15) <= 1.1 * smallest


@pytest.mark.parametrize("fixed", [0.0, 128.0, 100.0])
def test_a_fixed_zero_point_stays_and_the_scale_is_the_best_for_it(fixed: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(2000).abs() if fixed == 0 else torch.randn(2000)

    def error_of(scale: Tensor, zero_point: Tensor) -> Tensor:
        shape = (-1, 1)
        return (fake_quantize(x, scale.view(shape), zero_point.view(shape), 255) - x).square().sum(1)

    low, high = x.amin().clamp_max(0), x.amax()
    scale, zero_point = search_range(low, high, 255, error_of, fixed)
    assert zero_point == fixed
    tried = torch.linspace(0.002, 0.06, 3000)
    best = error_of(tried, torch.full_like(tried, fixed)).min()
    assert error_of(scale[None], zero_point[None]) <= 1.1 * best
