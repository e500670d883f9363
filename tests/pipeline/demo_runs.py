"""Quick runs of the embedded demo model."""

from typing import Any

import timm
import torch
from torch import Tensor, nn

import fimaq
from fimaq.data.demo import demo_calibration, demo_model, demo_test

SETTINGS: dict[str, Any] = {
    "bits": "w3a3",
    "iters": 6,
    "batch_size": 16,
    "search_size": 16,
    "calib_size": 64,
    "device": "cpu",
}
UNITS = 8
TINY = {"img_size": 32, "patch_size": 16, "depth": 2, "embed_dim": 24, "num_heads": 2, "num_classes": 7}


def quantize(model: nn.Module | None = None, images: Any = None, **settings: Any) -> fimaq.Run:
    given = demo_calibration(64) if images is None else images
    return fimaq.quantize(model or demo_model(), given, **{**SETTINGS, **settings})


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(demo_test()[0][:100])


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def timm_model(**changed: Any) -> nn.Module:
    """Random weights of visible size, so that attention is far from uniform."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **{**TINY, **changed}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return model
