"""model.safetensors is as small as its parts: weights at their bits, and what stays in float."""

from pathlib import Path

import pytest
import timm
import torch

import fimaq
from fimaq.quant.layers import quantized_layers


@pytest.mark.parametrize("bits", [4, 3])
def test_a_run_is_the_sum_of_its_parts(bits: int, tmp_path: Path) -> None:
    small = {"img_size": 64, "depth": 3, "num_classes": 100}
    model = timm.create_model("vit_tiny_patch16_224", **small)
    images = torch.randn(8, 3, 64, 64)
    given = {"bits": f"w{bits}a4", "method": "rtn", "batch_size": 8, "device": "cpu"}
    run = fimaq.quantize(model, images, out=tmp_path / "run", **given)
    layers = dict(quantized_layers(run.model))
    packed = sum(layer.codes.numel() * bits / 8 for layer in layers.values())
    weights = {id(layer.weight) for layer in layers.values()}
    stays_float = sum(4 * t.numel() for t in run.model.parameters() if id(t) not in weights)
    ranges = sum(5 * layer.weight_quantizer.scale.numel() for layer in layers.values())  # a float and a byte
    size = (tmp_path / "run" / "model.safetensors").stat().st_size
    assert packed < size < 1.05 * (packed + stays_float + ranges)
