"""What is hard is computed on integers: exactly, in whatever order it is summed, and as float arithmetic would."""

import pytest
import torch
from torch import nn

from fimaq.quant.fake import fake_quantize
from fimaq.quant.integer import exact_type
from fimaq.quant.layers import QuantizedLayer, QuantMatMul, convert_layer


def hard_layer(kind: str, bits: int) -> QuantizedLayer:
    torch.manual_seed(0)
    layer: nn.Module = nn.Linear(400, 7) if kind == "linear" else nn.Conv2d(4, 6, 3, padding=1, groups=2)
    convert_layer(layer, bits, bits)
    assert isinstance(layer, QuantizedLayer)
    levels, rows = 2**bits - 1, layer.weight.detach().flatten(1)
    scale = (rows.amax(1) - rows.amin(1)) / levels
    shape = (-1, *[1] * (layer.weight.dim() - 1))
    layer.weight_quantizer.set_range(scale.view(shape), torch.round(-rows.amin(1) / scale).view(shape))
    layer.input_quantizer.set_range(torch.tensor(6 / levels), torch.tensor(float(levels // 2)))
    layer.harden()
    return layer


@pytest.mark.parametrize("bits", [3, 8])
@pytest.mark.parametrize("kind", ["linear", "conv"])
@torch.no_grad()
def test_a_hard_layer_gives_what_its_dequantized_values_give(kind: str, bits: int) -> None:
    layer = hard_layer(kind, bits)
    x = torch.randn(3, 400) if kind == "linear" else torch.randn(3, 4, 5, 5)
    quantizer = layer.input_quantizer
    values = fake_quantize(x.double(), quantizer.scale.double(), quantizer.zero_point, quantizer.levels)
    weight, bias = layer.weight.double(), layer.bias.double()
    expected = (
        nn.functional.linear(values, weight, bias)
        if kind == "linear"
        else nn.functional.conv2d(values, weight, bias, padding=1, groups=2)
    )
    torch.testing.assert_close(layer(x), expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", [3, 8])
@torch.no_grad()
def test_the_order_of_summation_changes_no_bit(bits: int) -> None:
    layer = hard_layer("linear", bits)
    x, order = torch.randn(50, 400), torch.randperm(400)
    before = layer(x)
    layer.codes = layer.codes[:, order]
    assert torch.equal(layer(x[:, order]), before)


@torch.no_grad()
def test_a_product_of_activations_is_exact_too() -> None:
    product = QuantMatMul(8)
    product.quantized = True
    for quantizer in (product.left_quantizer, product.right_quantizer):
        quantizer.set_range(torch.tensor(0.03), torch.tensor(128.0))
    left, right, order = torch.randn(2, 9, 600), torch.randn(2, 600, 5), torch.randperm(600)
    found = product(left, right)
    assert torch.equal(product(left[..., order], right[:, order]), found)
    exact = product.left_quantizer(left).double() @ product.right_quantizer(right).double()
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_a_gradient_can_still_pass() -> None:
    layer = hard_layer("linear", 8)
    x = torch.randn(3, 400, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert x.grad.any()


def test_sums_that_could_leave_the_whole_numbers_of_float32_are_taken_in_float64() -> None:
    assert exact_type(258, 255, 255) == torch.float32
    assert exact_type(259, 255, 255) == torch.float64
    assert 258 * 255 * 255 < 2**24 < 259 * 255 * 255


@torch.no_grad()
def test_all_terms_of_a_window_count() -> None:
    """A patch has 3 * 16 * 16 terms, each up to 255 * 255: more than float32 adds up exactly."""
    layer = nn.Conv2d(3, 1, 16, 16)
    convert_layer(layer, 8, 8)
    layer.weight_quantizer.set_range(torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))
    layer.set_codes(torch.full_like(layer.weight, 255))
    layer.bias.zero_()
    x = torch.full((1, 3, 16, 16), 255.0)
    x[0, 0, 0, 0] = 254
    assert layer.steps(x)[0].dtype == torch.float64
    assert layer(x).item() == torch.tensor(255.0 * (768 * 255 - 1)).item()
