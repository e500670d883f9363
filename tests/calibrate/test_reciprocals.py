"""Scales that divide whether a runtime divides by them or multiplies with their reciprocals."""

import pytest
import torch
from torch import nn

from fimaq.calibrate.reciprocals import CELL, divisible, make_scales_divisible
from fimaq.quant.layers import QuantLinear, convert_layer


def differing(scale: torch.Tensor) -> float:
    """How often a division by `scale` and a product with its reciprocal have different bits."""
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(1))
    return float((x / scale != x * scale.reciprocal()).float().mean())


@pytest.mark.parametrize("exponent", [-8, -3, 0, 2, 6])
def test_a_product_with_the_reciprocal_divides(exponent: int) -> None:
    drawn = torch.rand(20, generator=torch.Generator().manual_seed(0)) * 10.0**exponent
    usual = torch.stack([torch.tensor(differing(scale)) for scale in drawn])
    found = torch.stack([torch.tensor(differing(divisible(scale))) for scale in drawn])
    assert usual.mean() > 0.1
    assert found.max() < 0.02


def test_only_the_last_digits_change() -> None:
    scales = torch.rand(100, generator=torch.Generator().manual_seed(0)) + 1e-3
    for scale in scales:
        found = divisible(scale)
        assert found.shape == scale.shape
        assert abs(int(found.view(torch.int32)) - int(scale.view(torch.int32))) < CELL
        assert torch.equal(divisible(found), found)


def test_scales_that_hardly_differ_become_one() -> None:
    scales = torch.rand(100, generator=torch.Generator().manual_seed(0)) + 1e-3
    same = sum(bool(divisible(torch.nextafter(scale, torch.tensor(9.0))) == divisible(scale)) for scale in scales)
    assert same >= 98


@pytest.mark.parametrize("scale", [0.0, 2.0**-130, 2.0**-149, 2.0**-20, 0.25, 1.0, 64.0])
def test_what_cannot_be_better_stays(scale: float) -> None:
    assert divisible(torch.tensor(scale)) == scale


def test_numbers_of_other_types_stay() -> None:
    scale = torch.tensor(0.3, dtype=torch.float64)
    assert divisible(scale) is scale


def test_scales_per_token_are_left_alone() -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).requires_grad_(False)
    scales = torch.tensor(0.3), torch.full((5, 1), 0.3)
    for layer, scale in zip(layers, scales, strict=True):
        convert_layer(layer, 4, 4)
        assert isinstance(layer, QuantLinear)
        layer.input_quantizer.set_range(scale, torch.full_like(scale, 3.0))
    make_scales_divisible(layers)
    first, second = (layer.input_quantizer for layer in layers)
    assert 0 < abs(first.scale - 0.3) < 4e-5
    assert first.zero_point == 3
    assert (second.scale == scales[1]).all()
