"""Train the ViT behind ``fimaq demo`` and write the two files embedded in ``fimaq.data.demo``.

    pip install -e '.[demo]' && python benchmarks/train_demo_model.py

About a minute on one CPU core. Digits are so easy that a plainly trained ViT keeps 97 % under crude 3-bit
rounding and would show nothing. Large ViTs lose far more, in good part because the outputs of their
LayerNorms differ in range from channel to channel; this one is given that trait on purpose, by
``spread_layer_norms``. The last line printed is what crude rounding leaves of its accuracy.
"""

import copy
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

import fimaq.data.demo as demo

SEED = 0
BATCH = 100
EPOCHS = 80
LEARNING_RATE = 2e-3
LAYER_NORM_SPREAD = 0.7
ARCHITECTURE: dict[str, Any] = dict(
    img_size=demo.INPUT_SIZE, patch_size=4, in_chans=1, num_classes=10, embed_dim=64, depth=6, num_heads=4
)


def load_split() -> dict[str, Tensor]:
    """scikit-learn's digits: images (1797, 8, 8) in 0..16, labels (1797,), and a seeded stratified split."""
    digits = load_digits()
    indices = range(len(digits.target))
    train, test = train_test_split(indices, train_size=1000, stratify=digits.target, random_state=SEED)
    return {
        "images": torch.from_numpy(digits.images).to(torch.uint8),
        "labels": torch.from_numpy(digits.target).to(torch.uint8),
        "train_indices": torch.tensor(train, dtype=torch.int16),
        "test_indices": torch.tensor(test, dtype=torch.int16),
    }


def augment(images: Tensor) -> Tensor:
    """Rotate by up to 12°, scale by up to 10 %, shift by up to 1.6 pixels and add noise; (n, 1, 16, 16)."""
    n = len(images)
    angle = torch.empty(n).uniform_(-math.radians(12), math.radians(12))
    scale = torch.empty(n).uniform_(0.9, 1.1)
    shift = torch.empty(n, 2).uniform_(-0.2, 0.2)
    cos, sin = scale * angle.cos(), scale * angle.sin()
    affine = torch.stack((cos, -sin, shift[:, 0], sin, cos, shift[:, 1]), dim=1).view(n, 2, 3)
    grid = F.affine_grid(affine, list(images.shape), align_corners=False)
    moved = F.grid_sample(images + 1, grid, align_corners=False) - 1  # +1: background is 0 outside the image
    return moved + 0.1 * torch.randn_like(moved)


def spread_layer_norms(model: nn.Module) -> None:
    """Start every LayerNorm with log-normal scales, so that its channels differ in range."""
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight, std=LAYER_NORM_SPREAD)
            module.weight.data.exp_()


def train(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """AdamW without weight decay, a short warm-up and a cosine learning rate, on augmented batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0)
    steps = EPOCHS * (len(images) // BATCH)
    schedule = OneCycleLR(optimizer, max_lr=LEARNING_RATE, total_steps=steps, pct_start=0.1)
    model.train()
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(images)).split(BATCH):
            loss = F.cross_entropy(model(augment(images[batch])), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Top-1 in per cent."""
    return 100 * (model(images).argmax(1) == labels).float().mean().item()


def round_to_grid(x: Tensor, low: Tensor, high: Tensor, bits: int) -> Tensor:
    """Round ``x`` to the 2^bits evenly spaced values from ``low`` to ``high`` (broadcast against ``x``)."""
    step = (high - low).clamp_min(1e-8) / (2**bits - 1)
    return ((x - low) / step).round().clamp(0, 2**bits - 1) * step + low


@torch.no_grad()
def crudely_quantized(model: nn.Module, calibration: Tensor, bits: int = 3) -> nn.Module:
    """Min-max rounding of every Linear: weights per output channel, inputs per tensor. No optimisation."""
    quantized = copy.deepcopy(model)
    linears = [module for module in quantized.modules() if isinstance(module, nn.Linear)]
    ranges: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def observe(module: nn.Module, args: tuple[Tensor]) -> None:
        ranges[module] = (args[0].min(), args[0].max())

    def quantize_input(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (round_to_grid(args[0], *ranges[module], bits),)

    observers = [linear.register_forward_pre_hook(observe) for linear in linears]
    quantized(calibration)
    for observer, linear in zip(observers, linears, strict=True):
        observer.remove()
        linear.register_forward_pre_hook(quantize_input)
        low, high = linear.weight.amin(1, keepdim=True), linear.weight.amax(1, keepdim=True)
        linear.weight.copy_(round_to_grid(linear.weight, low, high, bits))
    return quantized


def main() -> None:
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    out = Path(demo.__file__).parent
    digits = load_split()
    save_file(digits, out / demo.DIGITS_FILE)
    inputs, labels = demo.to_input(digits["images"]), digits["labels"].long()
    train_set, test_set = digits["train_indices"].long(), digits["test_indices"].long()

    model = VisionTransformer(**ARCHITECTURE)
    spread_layer_norms(model)
    start = time.perf_counter()
    train(model, inputs[train_set], labels[train_set])
    print(f"trained in {time.perf_counter() - start:.0f} s")
    model.half().float()  # measure the weights as they are stored
    top1 = accuracy(model, inputs[test_set], labels[test_set])
    metadata = {"architecture": json.dumps(ARCHITECTURE), "top1": f"{top1:.2f}"}
    save_file({name: x.half() for name, x in model.state_dict().items()}, out / demo.MODEL_FILE, metadata)
    print(f"full precision top-1 {top1:.2f}")
    crude = crudely_quantized(model, inputs[train_set[:128]])
    print(f"3-bit min-max rounding top-1 {accuracy(crude, inputs[test_set], labels[test_set]):.2f}")


if __name__ == "__main__":
    main()
