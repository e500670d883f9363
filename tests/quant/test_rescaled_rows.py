"""Products that read a softmax: each row divided by its largest element before it is quantized."""

import pytest
import torch
from torch import Tensor

from fimaq.calibrate.ranges import set_ranges
from fimaq.quant.fake import fake_quantize
from fimaq.quant.layers import QuantMatMul, largest_of_rows
from fimaq.quant.quantizers import ActivationQuantizer


@pytest.fixture
def operands() -> tuple[Tensor, Tensor]:
    """Attention of 64 tokens, half sharp and half nearly flat, and values: (4, 2, 64, 64), (4, 2, 64, 8)."""
    temperature = torch.tensor([8.0, 0.3]).repeat(32)[:, None]
    weights = (torch.randn(4, 2, 64, 64) * temperature).softmax(-1)
    # Values with a mean of their own: else a flat row's output is nothing but noise.
    return weights, torch.randn(4, 2, 64, 8) + torch.randn(4, 2, 1, 8)


def product(bits: int, operands: tuple[Tensor, Tensor], rescales_rows: bool) -> QuantMatMul:
    """With searched ranges, its quantizers on."""
    found = QuantMatMul(bits)
    found.rescales_rows = rescales_rows
    set_ranges(found, lambda: found(*operands), "deploy")
    found.quantized = True
    return found


@torch.no_grad()
def left_errors(bits: int, operands: tuple[Tensor, Tensor], rescales_rows: bool) -> Tensor:
    """Mean squared relative error of sharp and of flat rows, (2,), from quantizing the softmax alone."""
    left, right = operands
    found = product(bits, operands, rescales_rows)
    found.right_quantizer = ActivationQuantizer(20)  # so fine that it does not count
    spacing = (right.max() - right.min()) / 2**20
    found.right_quantizer.set_range(spacing, torch.round(-right.min() / spacing))
    exact = left @ right
    rows = (found(left, right) - exact).square().sum(-1) / exact.square().sum(-1)
    return torch.stack([rows[..., 0::2].mean(), rows[..., 1::2].mean()])


@torch.no_grad()
def test_at_eight_bits_the_product_is_the_plain_one_up_to_rounding(operands):
    exact = operands[0] @ operands[1]
    found = product(8, operands, True)(*operands)
    assert not torch.equal(found, exact)
    assert (found - exact).norm() < 0.02 * exact.norm()


@torch.no_grad()
def test_a_product_that_is_off_is_the_plain_one(operands):
    found = product(4, operands, True)
    found.quantized = False
    assert torch.equal(found(*operands), operands[0] @ operands[1])


def test_at_four_bits_sharp_and_flat_rows_are_both_far_more_accurate(operands):
    plain, rescaled = (left_errors(4, operands, rescales) for rescales in (False, True))
    assert (rescaled < 0.05 * plain).all(), (rescaled, plain)


@torch.no_grad()
def test_a_row_and_its_multiple_are_rounded_alike(operands):
    left, right = operands
    found = product(4, operands, True)
    torch.testing.assert_close(found(left / 64, right), found(left, right) / 64, rtol=0, atol=0)


@torch.no_grad()
def test_a_row_of_zeros_gives_zeros(operands):
    left, right = operands[0].clone(), operands[1]
    found = product(4, operands, True)
    left[0, 0, 0] = 0
    assert torch.equal(found(left, right)[0, 0, 0], torch.zeros(8))


def test_gradients_pass_through_as_if_nothing_were_rounded(operands):
    left, right = (t.clone().requires_grad_() for t in operands)
    found = product(8, operands, True)
    widest = found.left_quantizer.levels
    found.left_quantizer.set_range(torch.tensor(1 / widest), torch.tensor(0.0))  # nothing is clipped
    outwards = torch.randn(4, 2, 64, 8)
    gradient, values_gradient = torch.autograd.grad(found(left, right), (left, right), outwards)
    rounded = torch.no_grad()(found.right_quantizer)(right)
    torch.testing.assert_close(gradient, outwards @ rounded.transpose(-2, -1), rtol=1e-4, atol=1e-5)
    assert values_gradient.abs().sum() > 0


def test_the_largest_of_a_row_passes_no_gradient_and_is_never_zero():
    left = torch.tensor([[0.2, 0.8], [0.0, 0.0]], requires_grad=True)
    largest = largest_of_rows(left)
    assert not largest.requires_grad
    assert largest.shape == (2, 1)
    assert largest[0] == 0.8
    assert largest[1] > 0


def test_the_scale_of_a_rescaled_softmax_learns(operands):
    found = product(4, operands, True)
    scale = found.left_quantizer.scale.clone().requires_grad_()
    found.left_quantizer.scale = scale
    exact = operands[0] @ operands[1]
    (found(*operands) - exact).square().sum().backward()
    assert scale.grad is not None
    assert scale.grad.abs() > 0


def test_the_range_of_a_softmax_is_that_of_its_rescaled_rows(operands):
    """Of flat rows alone: none of their elements is above 0.1 before each is divided by its largest."""
    flat = (0.3 * torch.randn(4, 2, 64, 64)).softmax(-1)
    assert flat.max() < 0.1
    quantizer = product(4, (flat, operands[1]), True).left_quantizer
    assert 0.6 < quantizer.scale * quantizer.levels < 1.4


@torch.no_grad()
def test_ranges_around_a_rescaled_softmax_minimise_the_relative_error_of_the_output(operands):
    """Tokens of values differ in size, and so do outputs, which the next LayerNorm makes equal."""
    left, right = operands[0], operands[1] * torch.exp(torch.randn(4, 2, 64, 1))
    exact = left @ right
    size = exact.norm(dim=-1, keepdim=True)
    size = size + 0.3 * size.median()
    largest = largest_of_rows(left)

    def error_of_left(scale: Tensor, zero_point: Tensor) -> Tensor:
        rounded = fake_quantize(left / largest, scale, zero_point, 7) * largest
        return ((rounded @ right - exact) / size).square().sum()

    def error_of_right(scale: Tensor, zero_point: Tensor) -> Tensor:
        return ((left @ fake_quantize(right, scale, zero_point, 7) - exact) / size).square().sum()

    found = product(3, (left, right), True)
    one, two = found.left_quantizer, found.right_quantizer
    zeros = [torch.tensor(float(zero)) for zero in range(8)]
    best = min(error_of_left(s, zeros[0]) for s in torch.linspace(0.03, 0.3, 60))
    assert error_of_left(one.scale, one.zero_point) <= 1.05 * best
    widest = (right.max() - right.min()) / 7
    best = min(error_of_right(widest * s, z) for s in torch.linspace(0.1, 1.2, 60) for z in zeros[2:6])
    assert error_of_right(two.scale, two.zero_point) <= 1.05 * best
