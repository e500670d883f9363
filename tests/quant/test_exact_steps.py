"""What exact.py computes is what it should be, and does not depend on the order in which terms are summed."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fimaq.quant.exact import (
    ExactLayerNorm,
    exact_layer_norm,
    exponentials,
    offset_for,
    on_grid,
    step_of,
)
from fimaq.quant.layers import QuantLinear, convert_layer

WIDTH = 192


def tokens(count: int = 64) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(0))


def norm() -> nn.LayerNorm:
    generator = torch.Generator().manual_seed(1)
    plain = nn.LayerNorm(WIDTH).requires_grad_(False)
    plain.weight.copy_(torch.rand(WIDTH, generator=generator) + 0.5)
    plain.bias.copy_(torch.randn(WIDTH, generator=generator))
    return plain


def exact_norm() -> ExactLayerNorm:
    layer = norm()
    exact_layer_norm(layer, offset_for(2 * (WIDTH / 2**24) ** 0.5))
    assert isinstance(layer, ExactLayerNorm)
    return layer


@pytest.mark.parametrize("step", [2.0**-12, 2.0**-3, 4.0])
def test_a_grid_is_what_rounding_to_multiples_gives(step: float) -> None:
    x = 10 * tokens()
    assert torch.equal(on_grid(x, offset_for(step)), torch.round(x / step) * step)
    assert step_of(offset_for(step)) == step


def test_a_step_between_powers_of_two_becomes_the_larger_one() -> None:
    assert step_of(offset_for(0.3)) == 0.5


def test_an_exact_layer_norm_is_a_layer_norm() -> None:
    x = tokens()
    reference = F.layer_norm(x.double(), (WIDTH,), norm().weight.double(), norm().bias.double())
    error = (exact_norm()(x) - reference).norm() / reference.norm()
    assert error < 2e-3


def test_an_exact_layer_norm_does_not_depend_on_the_order_of_its_channels() -> None:
    x, layer, order = tokens(), exact_norm(), torch.randperm(WIDTH, generator=torch.Generator().manual_seed(2))
    ordered = exact_norm()
    ordered.weight.copy_(layer.weight[order])
    ordered.bias.copy_(layer.bias[order])
    assert torch.equal(ordered(x[:, order]), layer(x)[:, order])


def test_exponentials_over_their_sums_are_a_softmax() -> None:
    scores = 5 * tokens()
    powers, sums = exponentials(scores)
    assert (powers / sums - scores.double().softmax(-1)).abs().max() < 1 / 510  # half a step of 8 bits


def test_sums_of_exponentials_do_not_depend_on_their_order() -> None:
    scores, order = 3 * tokens(), torch.randperm(WIDTH, generator=torch.Generator().manual_seed(3))
    assert torch.equal(exponentials(scores[:, order])[1], exponentials(scores)[1])


def test_a_layer_before_a_gelu_gives_points_of_its_grid() -> None:
    layer = nn.Linear(WIDTH, 8).requires_grad_(False)
    convert_layer(layer, 4, 4)
    assert isinstance(layer, QuantLinear)
    layer.input_quantizer.set_range(torch.tensor(0.4), torch.tensor(7.0))
    layer.weight_quantizer.set_range(torch.full((8, 1), 0.02), torch.full((8, 1), 7.0))
    layer.harden()
    plain = layer(tokens())
    layer.output_offset = offset_for(2.0**-6)
    rounded = layer(tokens())
    assert torch.equal(rounded, torch.round(rounded * 64) / 64)
    assert (rounded - plain).abs().max() <= 2.0**-6  # the product and the bias are rounded


def test_gradients_pass_as_if_nothing_were_rounded() -> None:
    x = tokens().requires_grad_()
    on_grid(x, offset_for(0.5)).square().sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * on_grid(x.detach(), offset_for(0.5)))


def test_tokens_of_next_to_nothing_are_normalised_as_a_layer_norm_does() -> None:
    """Their variance, 1e-6, is below what a LayerNorm adds to it."""
    x, layer = 1e-3 * tokens(), norm()
    exact_layer_norm(layer, offset_for(2e-3 * (WIDTH / 2**24) ** 0.5))
    reference = F.layer_norm(x.double(), (WIDTH,), norm().weight.double(), norm().bias.double(), layer.eps)
    assert (layer(x) - reference).norm() / reference.norm() < 2e-3
