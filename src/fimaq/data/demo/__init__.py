"""The embedded demo: a small Vision Transformer trained on scikit-learn's handwritten digits.

Its LayerNorm channels differ in range on purpose, the trait that makes large ViTs hard to quantize. Both
files beside this module were written by ``benchmarks/train_demo_model.py``; nothing here needs
scikit-learn, a data folder or the network.
"""

import json
from functools import cache
from importlib.resources import as_file, files
from typing import Any

import torch.nn.functional as F
from safetensors import safe_open
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

MODEL_FILE = "vit_digits.safetensors"
DIGITS_FILE = "digits.safetensors"
GREY_LEVELS = 16
INPUT_SIZE = 16


def demo_model() -> nn.Module:
    """The trained ViT in float32 and eval mode; (n, 1, 16, 16) images in, (n, 10) logits out."""
    weights, metadata = _read(MODEL_FILE)
    architecture: dict[str, Any] = json.loads(metadata["architecture"])
    model = VisionTransformer(**architecture)
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return model.eval()


def demo_calibration(n: int = 128) -> Tensor:
    """The first ``n`` training images, unlabelled: (n, 1, 16, 16), float32 in [-1, 1].

    The training split is stored shuffled, so every prefix holds a random mix of the ten digits.
    """
    digits = _digits()
    train = digits["train_indices"]
    if not 1 <= n <= len(train):
        raise ValueError(f"n={n} calibration images asked for; the demo holds 1 to {len(train)}")
    return to_input(digits["images"][train[:n]])


def demo_test() -> tuple[Tensor, Tensor]:
    """The held-out split: images (797, 1, 16, 16), float32 in [-1, 1], and labels (797,), int64 in 0..9."""
    digits = _digits()
    test = digits["test_indices"]
    return to_input(digits["images"][test]), digits["labels"][test].long()


def to_input(images: Tensor) -> Tensor:
    """Turn (n, 8, 8) grey levels in 0..16 into the network's input: (n, 1, 16, 16), float32 in [-1, 1]."""
    scaled = images.float().unsqueeze(1) * (2 / GREY_LEVELS) - 1
    return F.interpolate(scaled, size=(INPUT_SIZE, INPUT_SIZE), mode="bilinear", align_corners=False)


@cache
def _digits() -> dict[str, Tensor]:
    digits, _ = _read(DIGITS_FILE)
    return {name: tensor.long() if name.endswith("indices") else tensor for name, tensor in digits.items()}


def _read(name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of one embedded safetensors file."""
    with as_file(files(__name__) / name) as path, safe_open(path, framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
        return tensors, file.metadata() or {}
