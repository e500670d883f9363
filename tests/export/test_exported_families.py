"""Every family of timm transformers computes the same bits after lowering, and in integers in onnxruntime."""

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from families import FAMILIES
from torch import Tensor, nn

import fimaq
from fimaq.export.lower import count_products, lower
from fimaq.export.onnx_file import onnx_model
from fimaq.export.verify import verify


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_family_is_exported_whole(family: str, noisy_model: Callable[..., nn.Module], tmp_path: Path) -> None:
    name, arguments = FAMILIES[family]
    images = torch.randn(8, 3, arguments["img_size"], arguments["img_size"])
    model = noisy_model(name, **arguments)
    quantized = fimaq.quantize(model, images, bits="w8a8", method="rtn", device="cpu").model
    own: Tensor = quantized(images)
    lowered = lower(quantized, images[:2])
    assert torch.equal(lowered(images), own)

    path = tmp_path / "model.onnx"
    path.write_bytes(ir.to_proto(onnx_model(lowered, images[:2])).SerializeToString())
    found = verify(path, lowered, {"images": images})
    assert found["float_products"] == {}
    assert found["integer_products"] == count_products(lowered) > 0
    compared = found["agreement"]["images"]
    assert compared["mean_logit_error"] < 0.02 * compared["mean_logit_size"]
