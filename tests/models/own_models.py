"""What unusual models are made of, and quick runs of them."""

from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fimaq

IMAGES = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
SETTINGS: dict[str, Any] = {"bits": "w8a8", "device": "cpu", "batch_size": 8, "iters": 3, "rank": 1}
SMALL: dict[str, Any] = {
    "img_size": 32, "patch_size": 16, "depth": 1, "embed_dim": 24, "num_heads": 2, "num_classes": 7
}  # fmt: skip


def timm_model() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", **SMALL).eval()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.proj = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Any:
        query, key, value = self.qkv(x).chunk(3, -1)
        return x + self.proj(F.scaled_dot_product_attention(query, key, value))


class Model(nn.Module):
    """Patches, one block, head."""

    def __init__(self, block: nn.Module | None = None, classes: int = 5) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.blocks = nn.ModuleList([block or Attention()])
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, classes)

    def forward(self, images: Tensor) -> Any:
        x = self.patches(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def quantize(model: nn.Module, **settings: Any) -> fimaq.Run:
    return fimaq.quantize(model.eval(), IMAGES, **{**SETTINGS, **settings})


@torch.no_grad()
def assert_is_close(run: fimaq.Run, model: nn.Module) -> None:
    """In 8 bits next to nothing is lost."""
    found, expected = run.model(IMAGES), model(IMAGES)
    assert (found - expected).norm() < 0.05 * expected.norm()


def doubled_forward(self: nn.Module, x: Tensor) -> Any:
    return 2 * type(self).forward(self, x)
