"""Fake quantization and its gradients against plain autograd, in float64."""

import pytest
import torch
from torch import Tensor

from fimaq.quant.fake import dequantize, fake_quantize, learned_fake_quantize, quantize
from fimaq.quant.quantizers import ActivationQuantizer

SHAPE = (2, 3, 5, 4)
BROADCASTS = {"tensor": (), "head": (3, 1, 1), "token": (3, 5, 1), "channel": (1, 4), "element": SHAPE}


def _straight_through(x: Tensor, scale: Tensor, zero_point: Tensor, levels: int) -> Tensor:
    """Rounding passes gradients as if it were not there, clipping stops them; all else is autograd's own.

    What rounds to the first or last level is not clipped. torch.clamp cannot say so: what gradient it gives
    at its very bounds depends on the version of torch.
    """
    scaled = x / scale
    steps = scaled + (scaled.round() - scaled).detach()
    codes = scaled.detach().round() + zero_point
    inside = (codes >= 0) & (codes <= levels)
    return torch.where(inside, steps, codes.clamp(0, levels) - zero_point) * scale


def _example(scale_shape: tuple[int, ...], levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """x well beyond the range on both sides, scale, integer zero point in the middle of the range."""
    x = torch.randn(SHAPE, dtype=torch.float64)
    scale = (4 / levels) * (0.5 + torch.rand(scale_shape, dtype=torch.float64)) / 2
    zero_point = torch.randint(1, levels, scale_shape).double()
    clipped = fake_quantize(x, scale, zero_point, levels)
    assert (x - clipped).max() > 1.5 * scale.max(), "some values must lie above the range"
    assert (clipped - x).max() > 1.5 * scale.max(), "and some below"
    return x.requires_grad_(), scale.requires_grad_(), zero_point


@pytest.mark.parametrize("scale_shape", BROADCASTS.values(), ids=BROADCASTS)
@pytest.mark.parametrize("levels", [3, 15, 255])
@pytest.mark.parametrize("drop", [False, True])
def test_output_and_gradients_are_those_of_straight_through(scale_shape, levels, drop):
    x, scale, zero_point = _example(scale_shape, levels)
    dropped = torch.rand(SHAPE) < 0.5 if drop else None
    grad = torch.randn(SHAPE, dtype=torch.float64)
    output = learned_fake_quantize(x, scale, zero_point, levels, dropped)
    expected = _straight_through(x, scale, zero_point, levels)
    if drop:
        expected = torch.where(dropped, x, expected)
    torch.testing.assert_close(output, expected)
    found = torch.autograd.grad(output, (x, scale), grad)
    reference = torch.autograd.grad(expected, (x, scale), grad)
    torch.testing.assert_close(found[0], reference[0])
    torch.testing.assert_close(found[1], reference[1])


def test_what_is_in_bf16_has_gradients_in_bf16_and_loses_none_of_the_scales():
    """The gradient that arrives is one of bf16 too, since what multiplies the output is."""
    x, grad = torch.randn(SHAPE).bfloat16(), torch.randn(SHAPE).bfloat16()
    scale, zero_point, levels = torch.full((3, 1, 1), 0.3), torch.tensor(3.0), 7
    found, wide = (
        torch.autograd.grad(
            learned_fake_quantize(given, leaf, zero_point, levels), (given, leaf), grad.to(torch.float32)
        )
        for given, leaf in (
            (x.requires_grad_(), scale.clone().requires_grad_()),
            (x.detach().float().requires_grad_(), scale.clone().requires_grad_()),
        )
    )
    assert found[0].dtype == torch.bfloat16
    torch.testing.assert_close(found[0].float(), wide[0], rtol=0, atol=0)
    torch.testing.assert_close(found[1], wide[1])


@pytest.mark.parametrize("row", [511, 512, 768, 1000, 1024])
def test_the_gradient_of_a_scale_is_the_sum_over_rows_of_any_length(row):
    x, grad = torch.randn(3, row, dtype=torch.float64), torch.randn(3, row, dtype=torch.float64)
    scale = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    found, expected = (
        torch.autograd.grad(quantized(x, scale, torch.tensor(7.0), 15), scale, grad)
        for quantized in (learned_fake_quantize, _straight_through)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("scale_shape", [(), (3, 1, 1)])
def test_no_gradient_is_needed_for_x(scale_shape):
    x, scale, zero_point = _example(scale_shape, 15)
    output = learned_fake_quantize(x.detach(), scale, zero_point, 15)
    expected = _straight_through(x.detach(), scale, zero_point, 15)
    torch.testing.assert_close(
        torch.autograd.grad(output.square().sum(), scale), torch.autograd.grad(expected.square().sum(), scale)
    )


@pytest.mark.parametrize("levels", [3, 15, 255])
def test_with_and_without_gradients_the_values_are_the_same(levels):
    x, scale, zero_point = _example((3, 5, 1), levels)
    learned = learned_fake_quantize(x, scale, zero_point, levels)
    torch.testing.assert_close(learned, fake_quantize(x, scale, zero_point, levels), rtol=0, atol=1e-15)


def test_codes_are_integers_in_range():
    x, scale, zero_point = _example((3, 1, 1), 7)
    codes = quantize(x.detach(), scale.detach(), zero_point, 7)
    assert torch.equal(codes, codes.round())
    assert (codes.min(), codes.max()) == (0, 7)


def test_every_code_stands_for_itself():
    codes = torch.arange(16.0, dtype=torch.float64)
    scale, zero_point = torch.tensor(0.3, dtype=torch.float64), torch.tensor(5.0, dtype=torch.float64)
    assert torch.equal(quantize(dequantize(codes, scale, zero_point), scale, zero_point, 15), codes)


@pytest.mark.parametrize("zero_point", [0.0, 1.0, 7.0])
def test_zero_is_exact(zero_point):
    zero = torch.zeros(3)
    assert torch.equal(fake_quantize(zero, torch.tensor(0.37), torch.tensor(zero_point), 7), zero)


def test_values_in_range_move_at_most_half_a_step():
    scale, zero_point = torch.tensor(0.1, dtype=torch.float64), torch.tensor(4.0, dtype=torch.float64)
    x = torch.linspace(-0.4, 1.1, 1001, dtype=torch.float64)
    assert (fake_quantize(x, scale, zero_point, 15) - x).abs().max() <= 0.05 + 1e-12


def test_a_quantizer_drops_only_while_gradients_are_taken():
    quantizer = ActivationQuantizer(4)
    quantizer.set_range(torch.tensor(0.5), torch.tensor(8.0))
    quantizer.dropping = (torch.rand(40 * 32) < 0.5, None)
    x = torch.randn(40, 25)
    expected = fake_quantize(x, quantizer.scale, quantizer.zero_point, 15)
    assert torch.equal(torch.no_grad()(quantizer)(x), expected)
    kept = quantizer(x)
    assert (kept == x).float().mean() == pytest.approx(0.5, abs=0.1)
    assert ((kept == x) | torch.isclose(kept, expected)).all()


def test_a_quantizer_drops_what_its_bits_say():
    quantizer = ActivationQuantizer(4)
    quantizer.set_range(torch.tensor(0.5), torch.tensor(8.0))
    bits, x = torch.rand(40 * 32) < 0.25, torch.randn(40, 25)
    quantizer.dropping = (bits, None)
    assert torch.equal(quantizer(x) == x, bits.view(40, 32)[:, :25])


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_a_quantizer_clips_at_the_same_levels_with_and_without_gradients(bits):
    quantizer = ActivationQuantizer(bits)
    quantizer.set_range(torch.tensor(0.5), torch.tensor(1.0))
    x = torch.tensor([-1e4, 1e4])
    expected = torch.tensor([-0.5, (2**bits - 2) * 0.5])
    assert torch.equal(quantizer(x), expected)
    assert torch.equal(torch.no_grad()(quantizer)(x), expected)


def test_only_scale_and_zero_point_are_stored():
    assert ActivationQuantizer(4).state_dict().keys() == {"scale", "zero_point"}


def test_a_quantizer_can_learn_its_scale():
    quantizer = ActivationQuantizer(4)
    scale = torch.tensor(0.5, requires_grad=True)
    quantizer.set_range(scale, torch.tensor(8.0))
    quantizer.scale = scale
    x = torch.randn(64)
    (quantizer(x) - x).square().sum().backward()
    reference = torch.tensor(0.5, requires_grad=True)
    (_straight_through(x, reference, torch.tensor(8.0), 15) - x).square().sum().backward()
    torch.testing.assert_close(scale.grad, reference.grad)
