"""The full-precision twin: the original's function, the quantized model's layout."""

from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor, nn

import fimaq
from fimaq.artifact.run_directory import RunDirectory
from fimaq.errors import FimaqError
from fimaq.models.prepare import Structure
from fimaq.quant.layers import quantized_layers
from fimaq.report.material import structure_of
from fimaq.report.twin import full_precision_twin


def test_the_twin_computes_what_the_original_does(
    original: nn.Module, quantized: nn.Module, structure: Structure, images: Tensor
) -> None:
    twin = full_precision_twin(original, quantized, structure, images[:2])
    torch.testing.assert_close(twin(images), original(images), rtol=1e-4, atol=1e-4)


def test_all_but_weights_of_layers_is_equal_in_twin_and_quantized_model(
    original: nn.Module, quantized: nn.Module, structure: Structure, images: Tensor
) -> None:
    twin = full_precision_twin(original, quantized, structure, images[:2])
    weights = {f"{name}.weight" for name, _ in quantized_layers(quantized)}
    stored = {n: t for n, t in quantized.state_dict().items() if n not in weights and "_quantizer." not in n}
    own = twin.state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in stored.items())
    folded = [n for n, t in original.state_dict().items() if "norm" in n and not torch.equal(t, own[n])]
    assert "norm.weight" in folded  # the last norm, which belongs to no unit, is read by the head


def test_weights_of_the_twin_are_a_rounding_away_from_the_stored_ones(
    original: nn.Module, quantized: nn.Module, structure: Structure, images: Tensor
) -> None:
    twin = dict(quantized_layers(full_precision_twin(original, quantized, structure, images[:2])))
    for name, layer in quantized_layers(quantized):
        scale, zero_point, levels = (
            layer.weight_quantizer.scale,
            layer.weight_quantizer.zero_point,
            layer.weight_quantizer.levels,
        )
        inside = twin[name].weight.clamp(-zero_point * scale, (levels - zero_point) * scale)
        assert ((layer.weight - inside).abs() <= 1.001 * scale + 1e-6).all(), name


def with_a_massive_channel() -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=24, num_heads=2, num_classes=5
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3) if parameter.dim() > 1 else parameter.add_(
                0.2 * torch.randn_like(parameter)
            )
        model.blocks[1].mlp.fc1.bias[7] = 60.0
    return model


def test_divided_channels_are_divided_in_the_twin(tmp_path: Path) -> None:
    model, images = with_a_massive_channel(), torch.randn(16, 3, 32, 32)
    fimaq.quantize(model, images, bits="w4a4", method="rtn", batch_size=8, device="cpu", out=tmp_path / "run")
    structure = structure_of(RunDirectory.open_existing(tmp_path / "run"))
    assert structure.divided["blocks.1.mlp.fc2"].keys() == {7}
    twin = full_precision_twin(model, fimaq.load(tmp_path / "run", model=model), structure, images[:2])
    with torch.no_grad():
        torch.testing.assert_close(twin(images), model(images), rtol=1e-4, atol=1e-4)


def test_weights_that_do_not_belong_to_the_run_have_no_twin(
    original: nn.Module, quantized: nn.Module, structure: Structure, images: Tensor
) -> None:
    original.blocks[0].norm1.weight *= 1.5
    original.blocks[0].norm1.bias += 0.5
    with pytest.raises(FimaqError, match="change the full-precision model's output"):
        full_precision_twin(original, quantized, structure, images[:2])
