"""One unit quantized alone, and the noise of layers, against whole models put together by hand."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fimaq.models.prepare import Structure
from fimaq.models.products import watched
from fimaq.report.sensitivity import Sensitivity, measure_sensitivity
from fimaq.report.twin import full_precision_twin

UNITS = 8


@pytest.fixture
def found(original: nn.Module, quantized: nn.Module, structure: Structure, images: Tensor) -> Sensitivity:
    twin = full_precision_twin(original, quantized, structure, images[:2])
    return measure_sensitivity(twin, quantized, structure, images)


def divergences(teacher: Tensor, student: Tensor) -> np.ndarray:
    """KL divergence of each row, in NumPy and float64."""
    p, q = (np.exp(t.double().numpy()) for t in (teacher, student))
    p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
    return (p * np.log(p / q)).sum(1)


def test_a_unit_quantized_alone_is_the_original_with_that_unit_exchanged(
    original: nn.Module, quantized: nn.Module, images: Tensor, found: Sensitivity
) -> None:
    teacher = original(images)
    assert len(found.units) == UNITS
    for unit in found.units:
        mixed = copy.deepcopy(original)
        mixed.set_submodule(unit.unit, copy.deepcopy(quantized.get_submodule(unit.unit)))
        if unit.unit == "head":  # the norm before it is folded into it
            mixed.norm = copy.deepcopy(quantized.norm)
        logits = mixed(images)
        expected = divergences(teacher, logits)
        # Values on the edge of two codes may fall to either side by the last bit of a folded norm.
        assert unit.kl == pytest.approx(expected.mean(), rel=0.02, abs=1e-5), unit.unit
        assert unit.kl_error == pytest.approx(expected.std(ddof=1) / math.sqrt(len(images)), rel=0.02, abs=1e-5)
        assert unit.agreeing == int((logits.argmax(1) == teacher.argmax(1)).sum())


def test_the_error_of_a_unit_is_that_of_its_own_output(
    original: nn.Module, quantized: nn.Module, images: Tensor, found: Sensitivity
) -> None:
    seen: list[tuple[Tensor, Tensor]] = []
    block = original.blocks[2]
    hook = block.register_forward_hook(lambda m, args, out: seen.append((args[0], out)))
    original(images)
    hook.remove()
    inputs, exact = seen[0]
    error = (quantized.blocks[2](inputs) - exact).norm() / exact.norm()
    record = next(unit for unit in found.units if unit.unit == "blocks.2")
    assert record.output.relative == pytest.approx(float(error), rel=0.01)


def test_all_units_together_are_the_quantized_model(
    original: nn.Module, quantized: nn.Module, images: Tensor, found: Sensitivity
) -> None:
    teacher, logits = original(images), quantized(images)
    assert found.whole.kl == pytest.approx(divergences(teacher, logits).mean(), rel=1e-3)
    assert found.whole.agreeing == int((teacher.argmax(1) == logits.argmax(1)).sum())
    assert found.images == len(images)


def outputs_of(model: nn.Module, name: str, images: Tensor) -> Tensor:
    seen: list[Tensor] = []
    hook = model.get_submodule(name).register_forward_hook(lambda m, args, out: seen.append(out))
    with watched(model):
        model(images)
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("name", ["blocks.0.mlp.fc2", "blocks.3.attn.proj", "head"])
def test_noise_in_the_model_is_what_hooks_on_both_models_see(
    original: nn.Module, quantized: nn.Module, images: Tensor, found: Sensitivity, name: str
) -> None:
    exact, noisy = outputs_of(original, name, images).double(), outputs_of(quantized, name, images).double()
    expected = 10 * math.log10(exact.square().sum() / (noisy - exact).square().sum())
    layer = next(layer for layer in found.layers if layer.name == name)
    assert layer.in_model.decibels == pytest.approx(expected, abs=0.1)


def test_own_noise_is_that_of_the_layer_with_exact_inputs(
    original: nn.Module, quantized: nn.Module, images: Tensor, found: Sensitivity
) -> None:
    exact = original.patch_embed.proj(images).double()
    noisy = quantized.patch_embed.proj(images).double()
    expected = 10 * math.log10(exact.square().sum() / (noisy - exact).square().sum())
    assert found.layers[0].name == "patch_embed.proj"
    assert found.layers[0].own.decibels == pytest.approx(expected, abs=0.01)
    deep = next(layer for layer in found.layers if layer.name == "blocks.3.mlp.fc2")
    assert deep.own.decibels > deep.in_model.decibels


def test_layers_come_in_the_order_they_run(found: Sensitivity) -> None:
    first = [layer.name.removeprefix("blocks.0.") for layer in found.layers if layer.unit == "blocks.0"]
    assert first == ["attn.qkv", "attn.products.0", "attn.products.1", "attn.proj", "mlp.fc1", "mlp.fc2"]


def test_histograms_hold_every_value_and_what_is_clipped(
    quantized: nn.Module, images: Tensor, found: Sensitivity
) -> None:
    of_input, of_weight = found.layers[0].distributions
    pixels = images[:16].numpy()
    assert sum(of_input.counts) == pixels.size
    assert (of_input.low, of_input.high) == (pixels.min(), pixels.max())
    layer = quantized.patch_embed.proj
    scale, zero_point = (t.numpy() for t in (layer.weight_quantizer.scale, layer.weight_quantizer.zero_point))
    assert of_weight.ranges == scale.size
    assert of_weight.chosen[0] == pytest.approx(np.sort((-zero_point * scale).ravel())[(scale.size - 1) // 2])
    assert sum(of_weight.counts) == layer.weight.numel()


def test_a_mirror_image_of_full_precision_has_no_noise(
    original: nn.Module, quantized: nn.Module, structure: Structure, images: Tensor
) -> None:
    twin = full_precision_twin(original, quantized, structure, images[:2])
    found = measure_sensitivity(twin, copy.deepcopy(twin), structure, images[:2])
    assert all(unit.kl == pytest.approx(0, abs=1e-9) for unit in found.units)
    assert all(layer.own.decibels > 100 for layer in found.layers)
    assert found.whole.agreeing == 2


def test_models_are_left_as_they_were(
    original: nn.Module, quantized: nn.Module, structure: Structure, images: Tensor
) -> None:
    before = [(m, copy.deepcopy(m.state_dict()), m(images)) for m in (original, quantized)]
    twin = full_precision_twin(original, quantized, structure, images[:2])
    measure_sensitivity(twin, quantized, structure, images[:2])
    for model, state, output in before:
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
        assert torch.equal(model(images), output)
