"""What tests of reconstruction start from: units of the demo model with searched ranges, and a single Linear."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fimaq.calibrate.fold import fold_layer_norms
from fimaq.calibrate.ranges import set_ranges
from fimaq.config import Config
from fimaq.data.demo import demo_calibration, demo_model
from fimaq.models.prepare import prepare_model
from fimaq.models.units import UnitChain
from fimaq.quant.layers import set_quantized
from fimaq.reconstruct.algorithm import Reconstruction
from fimaq.reconstruct.cache import ActivationCache
from fimaq.reconstruct.objectives import MeanSquaredError
from fimaq.reconstruct.step import ReconstructionStep

COUNT = 64
BLOCK = 1
"""Unit 0 is the patch embedding, unit 1 the first block."""


def configured(**settings: Any) -> Config:
    defaults = {"bits": "w3a3", "method": "qdrop", "iters": 10, "batch_size": 16, "search_size": 16}
    return Config.create(**{**defaults, "calib_size": COUNT, "device": "cpu", **settings})


def walk(config: Config) -> Reconstruction:
    """The demo model, prepared and folded, at its first unit."""
    device = torch.device(config.device)
    model, images = demo_model().to(device), demo_calibration(COUNT).to(device)
    structure = prepare_model(model, images[:2], config.weight_bits, config.activation_bits)
    chain = UnitChain(model, structure, images[:2])
    fold_layer_norms(model, images[:2], lambda: iter([images[:16]]))
    return Reconstruction(chain, images, config, ActivationCache(COUNT, device))


def first_block(config: Config, report: Callable[[int, float], None] = lambda *_: None) -> tuple[Any, Any]:
    """Reconstruct the patch embedding and the first block; the walk and the verdict on the block."""
    reconstruction = walk(config)
    reconstruction.reconstruct(0, lambda *_: None)
    reconstruction.advance(0)
    return reconstruction, reconstruction.reconstruct(BLOCK, report)


def demo_step(index: int = BLOCK, **settings: Any) -> ReconstructionStep:
    """A step on one of the demo model's units, behind units that are not quantized."""
    reconstruction = walk(configured(**settings))
    for earlier in range(index):
        reconstruction.cache_full_precision(earlier)
        reconstruction.advance(earlier)
    reconstruction.cache_full_precision(index)
    return _started(reconstruction, index)


def linear_step(size: float = 1.0, **settings: Any) -> ReconstructionStep:
    """A step on one Linear whose inputs are `size` times as large, and its weights as much smaller."""
    torch.manual_seed(1)
    layer = nn.Linear(12, 6)
    layer.weight.data /= size
    return module_step(layer, size * torch.randn(COUNT, 5, 12), **settings)


def module_step(module: nn.Module, inputs: Tensor, **settings: Any) -> ReconstructionStep:
    """A step on a module that is a whole model."""
    chain = UnitChain(module, prepare_model(module, inputs[:2], 3, 3), inputs[:2])
    config = configured(**settings)
    reconstruction = Reconstruction(chain, inputs, config, ActivationCache(COUNT, torch.device("cpu")))
    reconstruction.cache_full_precision(0)
    return _started(reconstruction, 0)


@torch.no_grad()
def _started(reconstruction: Reconstruction, index: int) -> ReconstructionStep:
    """Ranges searched, quantizers on, and mean squared error to be learned by."""
    unit, cache = reconstruction.chain.units[index], reconstruction.cache
    inputs, targets = cache.rows("raw inputs", 0, 16), cache.rows("outputs", 0, 16)
    set_ranges(unit.module, lambda: unit(inputs), reconstruction.config.preset)
    set_quantized(unit.module, True)
    deltas = unit(inputs)[0].flatten(1) - targets[0].flatten(1)
    torch.manual_seed(0)
    return ReconstructionStep(unit, MeanSquaredError(deltas), reconstruction.config, cache)


def run(step: ReconstructionStep, times: int) -> list[Tensor]:
    """What is learned after so many more steps: roundings and scales, each joined into one tensor."""
    for _ in range(times):
        step()
    return [step.tensors[group].clone() for group in ("roundings", "scales")]


def same(one: list[Tensor], two: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
