"""Scales are changed a little where much would lie right between two codes, and only there."""

import pytest
import torch
from torch import Tensor, nn

from fimaq.calibrate import ties
from fimaq.calibrate.reciprocals import divisible
from fimaq.calibrate.ties import FACTORS, NEAR, avoid_ties
from fimaq.quant.layers import QuantLinear, QuantMatMul, convert_layer, set_quantized


def linear(scale: float, bits: int = 4) -> QuantLinear:
    layer = nn.Linear(8, 4).requires_grad_(False)
    convert_layer(layer, 8, bits)
    assert isinstance(layer, QuantLinear)
    layer.input_quantizer.set_range(torch.tensor(scale), torch.tensor(3.0))
    set_quantized(layer, True)
    return layer


def between_codes(layer: QuantLinear, x: Tensor) -> int:
    steps = x.double() / layer.input_quantizer.scale.double()
    return int(((steps - steps.floor() - 0.5).abs() < NEAR).sum())


def test_a_recurring_value_between_two_codes_is_avoided() -> None:
    layer, x = linear(0.25), torch.full((10, 8), 0.25 * 2.5)
    assert between_codes(layer, x) == 80
    avoid_ties(layer, lambda: layer(x))
    assert between_codes(layer, x) == 0
    assert 0.994 < layer.input_quantizer.scale / 0.25 < 1.006
    assert layer.input_quantizer.zero_point == 3


def test_nothing_changes_where_nothing_lies_between() -> None:
    layer, x = linear(0.25), torch.full((10, 8), 0.25 * 2.2)
    avoid_ties(layer, lambda: layer(x))
    assert layer.input_quantizer.scale == 0.25


def test_what_is_clipped_anyway_does_not_count() -> None:
    layer, x = linear(0.25), torch.full((10, 8), 0.25 * 12.5)  # codes end at 15 - 3 steps
    avoid_ties(layer, lambda: layer(x))
    assert layer.input_quantizer.scale == 0.25


def test_scales_per_token_are_left_alone() -> None:
    layer, x = linear(0.25), torch.full((5, 2, 8), 0.25 * 2.5)
    layer.input_quantizer.set_range(torch.full((2, 1), 0.25), torch.full((2, 1), 3.0))
    avoid_ties(layer, lambda: layer(x))
    assert (layer.input_quantizer.scale == 0.25).all()


@pytest.mark.parametrize("side", ["left_quantizer", "right_quantizer"])
def test_both_operands_of_a_product_are_looked_at(side: str) -> None:
    product = QuantMatMul(4)
    for name in ("left_quantizer", "right_quantizer"):
        product.get_submodule(name).set_range(torch.tensor(0.1 if name != side else 0.25), torch.tensor(3.0))
    product.quantized = True
    x = torch.full((2, 3, 3), 0.25 * 1.5)
    avoid_ties(product, lambda: product(x, x))
    assert product.get_submodule(side).scale != 0.25


def test_no_change_is_tried_first() -> None:
    assert FACTORS[0] == 1.0
    assert len(set(FACTORS)) == len(FACTORS)


def test_a_scale_stays_where_no_more_than_usual_lies_between(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = linear(0.25), torch.ones(10, 8)
    counts = iter([30, 2, *[20] * (len(FACTORS) - 2)])
    monkeypatch.setattr(ties, "_between_codes", lambda *_: next(counts))
    avoid_ties(layer, lambda: layer(x))
    assert layer.input_quantizer.scale == 0.25


def test_the_scale_that_is_taken_instead_divides_like_its_reciprocal() -> None:
    layer, x = linear(0.25), torch.full((10, 8), 0.25 * 2.5)
    avoid_ties(layer, lambda: layer(x))
    scale = layer.input_quantizer.scale
    assert scale != 0.25
    assert divisible(scale) == scale


def test_what_follows_a_changed_scale_is_judged_by_what_it_sees_then(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = linear(0.25), nn.Linear(4, 4).requires_grad_(False)
    convert_layer(second, 8, 4)
    model, x = nn.Sequential(first, second), torch.full((10, 8), 0.25 * 2.5)
    set_quantized(model, True)
    for layer in model:
        layer.weight_quantizer.set_range(torch.tensor(0.01), torch.tensor(128.0))
    seen: dict[nn.Module, Tensor] = {}
    counted = ties._between_codes
    monkeypatch.setattr(ties, "_between_codes", lambda q, x, s: seen.update({q: x}) or counted(q, x, s))
    before = first(x)
    avoid_ties(model, lambda: model(x))
    assert not torch.equal(first(x), before)
    assert torch.equal(seen[second.input_quantizer], first(x))


def test_rows_of_a_softmax_are_looked_at_as_they_are_quantized() -> None:
    product = QuantMatMul(4)
    product.left_quantizer.set_range(torch.tensor(0.25), torch.tensor(0.0))
    product.right_quantizer.set_range(torch.tensor(0.1), torch.tensor(3.0))
    product.quantized = product.rescales_rows = True
    left = torch.tensor([0.5, 0.3125, 0.3125]).expand(2, 3, 3)  # 0.625 of the largest: two scales and a half
    avoid_ties(product, lambda: product(left, torch.zeros(2, 3, 3)))
    assert product.left_quantizer.scale != 0.25
