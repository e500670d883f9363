"""AdaRound: starts at the real weight, learns within one step, ends exactly on the stored integers."""

import pytest
import torch
from torch import Tensor, nn

from fimaq.quant.fake import fake_quantize
from fimaq.quant.layers import QuantizedLayer, convert_layer, set_quantized
from fimaq.quant.quantizers import WeightQuantizer

BITS = [2, 3, 4, 8]


def _ranges(weight: Tensor, bits: int, cover: float) -> tuple[Tensor, Tensor]:
    """Per-channel ranges that hold `cover` of what lies between each channel's extremes."""
    rows = weight.flatten(1)
    low, high = rows.amin(1) * cover, rows.amax(1) * cover
    scale = (high - low) / (2**bits - 2)
    shape = (-1, *[1] * (weight.dim() - 1))
    return scale.view(shape), torch.ceil(-low / scale).view(shape)


def _quantizer(weight: Tensor, bits: int, cover: float = 1.0) -> WeightQuantizer:
    quantizer = WeightQuantizer(bits)
    quantizer.set_range(*_ranges(weight, bits, cover))
    return quantizer


def _dequantized(quantizer: WeightQuantizer, codes: Tensor) -> Tensor:
    return (codes - quantizer.zero_point) * quantizer.scale


@pytest.fixture(params=[(6, 5), (4, 3, 2, 2)], ids=["linear", "conv"])
def weight(request) -> Tensor:
    return torch.randn(request.param, dtype=torch.float64)


@pytest.mark.parametrize("bits", BITS)
def test_before_learning_weights_go_to_the_nearest_level(weight, bits):
    quantizer = _quantizer(weight, bits)
    levels = _dequantized(quantizer, torch.arange(2.0**bits, dtype=torch.float64).view(-1, *[1] * weight.dim()))
    nearest = (levels - weight).abs().amin(0)
    torch.testing.assert_close((quantizer(weight) - weight).abs(), nearest)


@pytest.mark.parametrize("bits", BITS)
def test_learning_starts_at_the_real_weight(weight, bits):
    quantizer = _quantizer(weight, bits)
    quantizer.start_learning(weight)
    torch.testing.assert_close(quantizer(weight), weight, rtol=1e-9, atol=1e-9)


def test_learning_starts_at_the_clipped_weight_where_out_of_range(weight):
    quantizer = _quantizer(weight, 3, cover=0.5)
    quantizer.start_learning(weight)
    low, high = -quantizer.zero_point * quantizer.scale, (7 - quantizer.zero_point) * quantizer.scale
    clipped = torch.maximum(torch.minimum(weight, high), low)
    assert not torch.equal(clipped, weight)
    torch.testing.assert_close(quantizer(weight), clipped, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bits", BITS)
def test_converged_rounding_is_already_on_the_integers(weight, bits):
    quantizer = _quantizer(weight, bits, cover=0.7)
    quantizer.start_learning(weight)
    quantizer.rounding = 50 * torch.randn_like(weight).sign()
    assert torch.equal(quantizer(weight), _dequantized(quantizer, quantizer.codes(weight)))


@pytest.mark.parametrize("up", [True, False])
def test_rounding_goes_the_way_it_was_learned(weight, up):
    quantizer = _quantizer(weight, 8)
    quantizer.start_learning(weight)
    quantizer.rounding = torch.full_like(weight, 50.0 if up else -50.0)
    scaled = weight / quantizer.scale
    expected = (scaled.floor() + 1 if up else scaled.floor()) * quantizer.scale
    torch.testing.assert_close(quantizer(weight), expected)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("learned", [True, False])
def test_codes_are_integers_in_range(weight, bits, learned):
    quantizer = _quantizer(weight, bits, cover=0.4)
    if learned:
        quantizer.start_learning(weight)
        quantizer.rounding = 10 * torch.randn_like(weight)
    codes = quantizer.codes(weight)
    assert torch.equal(codes, codes.round())
    assert (codes.min(), codes.max()) == (0, 2**bits - 1)


def test_the_gradient_of_rounding_is_that_of_the_soft_weight(weight):
    quantizer = _quantizer(weight, 4, cover=0.8)
    quantizer.start_learning(weight)
    quantizer.rounding = quantizer.rounding.clone().requires_grad_()

    def soft(rounding: Tensor) -> Tensor:
        quantizer.rounding = rounding
        return quantizer(weight)

    assert torch.autograd.gradcheck(soft, quantizer.rounding, atol=1e-6)


def test_what_is_learned_about_rounding_is_not_stored(weight):
    quantizer = _quantizer(weight, 4)
    quantizer.start_learning(weight)
    assert "rounding" in dict(quantizer.named_buffers())
    assert quantizer.state_dict().keys() == {"scale", "zero_point"}


def _layer(kind: str) -> tuple[QuantizedLayer, Tensor]:
    """A quantized layer in float64 with 8-bit inputs and 3-bit weights, and an input for it."""
    if kind == "linear":
        layer, x = nn.Linear(5, 6).double(), torch.randn(7, 5, dtype=torch.float64)
    else:
        layer = nn.Conv2d(4, 6, 3, padding=1, groups=2).double()
        x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    layer.requires_grad_(False)
    convert_layer(layer, 3, 8)
    layer.input_quantizer.set_range(torch.tensor(0.04).double(), torch.tensor(128.0).double())
    layer.weight_quantizer.set_range(*_ranges(layer.weight, 3, 0.8))
    return layer, x


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_a_hard_layer_computes_with_its_integers(kind):
    layer, x = _layer(kind)
    layer.weight_quantizer.start_learning(layer.weight)
    layer.weight_quantizer.rounding = 10 * torch.randn_like(layer.weight)
    layer.harden()
    stored = _dequantized(layer.weight_quantizer, layer.codes.double())
    x_quantized = fake_quantize(x, layer.input_quantizer.scale, layer.input_quantizer.zero_point, 255)
    if kind == "linear":
        expected = x_quantized @ stored.T + layer.bias
    else:
        expected = nn.functional.conv2d(x_quantized, stored, layer.bias, padding=1, groups=2)
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_hardening_a_converged_layer_changes_nothing(kind):
    layer, x = _layer(kind)
    layer.quantized = True
    layer.weight_quantizer.start_learning(layer.weight)
    layer.weight_quantizer.rounding = 50 * torch.randn_like(layer.weight).sign()
    soft, soft_weight = layer(x), layer.effective_weight()
    layer.harden()
    assert torch.equal(layer.effective_weight(), soft_weight)
    torch.testing.assert_close(layer(x), soft, rtol=1e-12, atol=1e-12)


def test_hardening_counts_what_nearest_rounding_would_not_give():
    layer, _ = _layer("linear")
    layer.weight_quantizer.set_range(torch.full((6, 1), 1.0).double(), torch.full((6, 1), 3.0).double())
    layer.weight.data = torch.full((6, 5), 0.25).double()
    layer.weight_quantizer.start_learning(layer.weight)
    rounding = torch.full((6, 5), -9.0).double()
    rounding[0, :4] = 9.0
    layer.weight_quantizer.rounding = rounding
    assert layer.harden() == 4


def test_hardening_without_learning_keeps_nearest_rounding():
    layer, x = _layer("linear")
    layer.quantized = True
    before = layer(x)
    assert layer.harden() == 0
    torch.testing.assert_close(layer(x), before, rtol=1e-12, atol=1e-12)


def test_a_layer_that_is_off_is_the_full_precision_layer():
    layer, x = _layer("linear")
    set_quantized(layer, False)
    torch.testing.assert_close(layer(x), x @ layer.weight.T + layer.bias)
