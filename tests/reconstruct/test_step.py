"""Reconstruction of single units of the demo model: schedules, integer weights, and that it helps."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fimaq.calibrate.fold import fold_layer_norms
from fimaq.calibrate.ranges import set_ranges
from fimaq.config import Config
from fimaq.data.demo import demo_calibration, demo_model
from fimaq.models.prepare import prepare_model
from fimaq.models.units import UnitChain
from fimaq.quant.layers import activation_quantizers, quantized_layers, set_quantized
from fimaq.reconstruct import algorithm
from fimaq.reconstruct.algorithm import Reconstruction
from fimaq.reconstruct.cache import ActivationCache
from fimaq.reconstruct.objectives import MeanSquaredError
from fimaq.reconstruct.step import ReconstructionStep

COUNT = 64
BLOCK = 1
"""Unit 0 is the patch embedding, unit 1 the first block."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def configured(**settings: Any) -> Config:
    defaults = {"bits": "w3a3", "method": "qdrop", "iters": 10, "batch_size": 16, "search_size": 16}
    return Config.create(**{**defaults, "calib_size": COUNT, "device": "cpu", **settings})


def walk(config: Config) -> Reconstruction:
    """The demo model, prepared and folded, at its first unit."""
    model, images = demo_model(), demo_calibration(COUNT)
    chain = UnitChain(model, prepare_model(model, images[:2], config.weight_bits, 3), images[:2])
    fold_layer_norms(model, images[:2], lambda: iter([images[:16]]))
    return Reconstruction(chain, images, config, ActivationCache(COUNT, torch.device("cpu")))


def first_block(config: Config, report: Callable[[int, float], None] = lambda *_: None) -> tuple[Any, Any]:
    """Reconstruct the patch embedding and the first block; the walk and the verdict on the block."""
    reconstruction = walk(config)
    reconstruction.reconstruct(0, lambda *_: None)
    reconstruction.advance(0)
    return reconstruction, reconstruction.reconstruct(BLOCK, report)


class Bench:
    """A step on the first block, its quantizers searched, and a fixed batch to run it on."""

    def __init__(self, **settings: Any) -> None:
        self.config = configured(**settings)
        reconstruction = walk(self.config)
        reconstruction.cache_full_precision(0)
        reconstruction.advance(0)
        reconstruction.cache_full_precision(BLOCK)
        unit = reconstruction.chain.units[BLOCK]
        rows = reconstruction.cache.rows
        self.inputs, self.targets = rows("raw inputs", 0, 16), rows("outputs", 0, 16)
        set_ranges(unit.module, lambda: unit(self.inputs), "deploy")
        set_quantized(unit.module, True)
        deltas = unit(self.inputs)[0].flatten(1) - self.targets[0].flatten(1)
        torch.manual_seed(0)
        self.step = ReconstructionStep(unit, MeanSquaredError(deltas), self.config, torch.device("cpu"))

    def run(self, steps: int) -> list[Tensor]:
        for _ in range(steps):
            self.step(self.inputs, self.inputs, self.targets, [])
        return [p.detach().clone() for p in self.step.parameters]


def same(one: list[Tensor], two: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_the_rounding_penalty_does_nothing_before_the_warm_up_ends() -> None:
    heavy, none = (Bench(rounding_weight=w, warmup=0.5).run(5) for w in (100.0, 0.0))
    assert same(heavy, none)


def test_the_rounding_penalty_acts_once_the_warm_up_has_ended() -> None:
    heavy, none = (Bench(rounding_weight=w, warmup=0.5).run(6) for w in (100.0, 0.0))
    assert not same(heavy, none)


def test_the_rounding_penalty_drives_every_weight_to_a_decision() -> None:
    bench = Bench(rounding_weight=1.0, rounding_lr=0.1, warmup=0.0, iters=60)
    bench.run(60)
    undecided = torch.cat([r.detach().flatten() for r in bench.step.roundings])
    soft = (torch.sigmoid(undecided) * 1.2 - 0.1).clamp(0, 1)
    assert ((soft < 0.05) | (soft > 0.95)).float().mean() > 0.95


def test_the_learning_rate_of_the_scales_falls_to_zero_as_a_cosine() -> None:
    bench = Bench(scale_lr=1e-3)
    rates = []
    for _ in range(10):
        bench.run(1)
        rates.append(bench.step.scale_lr.item())
    expected = [1e-3 * (1 + math.cos(math.pi * i / 10)) / 2 for i in range(1, 11)]
    assert rates == pytest.approx(expected, abs=1e-9)


def test_scales_move_while_their_learning_rate_is_above_zero_and_not_after() -> None:
    bench = Bench(scale_lr=1e-3)
    scales = slice(len(bench.step.roundings), None)
    before, middle = bench.run(0)[scales], bench.run(9)[scales]
    assert not same(before, middle)
    assert same(middle, bench.run(1)[scales])


def test_scales_stay_positive_whatever_the_learning_rate() -> None:
    bench = Bench(scale_lr=10.0, drop_probability=0.0)
    bench.run(5)
    assert all((scale > 0).all() for scale in bench.step.scales)


def test_dropping_is_over_after_a_step() -> None:
    bench = Bench(drop_probability=0.5)
    bench.run(1)
    assert {q.drop_probability for q in bench.step.quantizers} == {0.0}


def test_reconstructed_weights_lie_on_the_integer_grid() -> None:
    reconstruction, _ = first_block(configured())
    layers = dict(quantized_layers(reconstruction.chain.units[BLOCK].module))
    assert len(layers) == 4
    for layer in layers.values():
        quantizer = layer.weight_quantizer
        codes = (layer.weight / quantizer.scale + quantizer.zero_point).double()
        assert (codes - codes.round()).abs().max() < 1e-4
        assert codes.round().min() >= 0
        assert codes.round().max() <= 7
        assert torch.equal(codes.round(), layer.codes.double())


def test_losses_are_reported_relative_to_the_start_up_to_the_last_iteration() -> None:
    seen: list[tuple[int, float]] = []
    _, result = first_block(configured(), lambda i, loss: seen.append((i, loss)))
    assert result.losses == seen
    assert [i for i, _ in seen] == list(range(10))


def output_error(method: str) -> float:
    """Mean squared error of what the second block is given, behind two quantized units."""
    reconstruction, _ = first_block(configured(method=method, iters=150, batch_size=32, rounding_lr=1e-2))
    reconstruction.advance(BLOCK)
    quantized, raw = (reconstruction.cache.rows(f"{p} inputs", 0, COUNT)[0] for p in ("quantized", "raw"))
    return (quantized - raw).square().mean().item()


def test_reconstruction_lowers_the_output_error_of_rounding_to_nearest() -> None:
    assert output_error("qdrop") < 0.9 * output_error("rtn")


@pytest.fixture
def runaway(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_a_number(self: object, deltas: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        return deltas.sum() * torch.nan

    monkeypatch.setattr(algorithm.MeanSquaredError, "__call__", not_a_number)


@pytest.mark.usefixtures("runaway")
def test_a_loss_that_is_not_finite_is_reported() -> None:
    _, result = first_block(configured())
    assert result.finite is False


@pytest.mark.usefixtures("runaway")
def test_a_loss_that_is_not_finite_keeps_the_range_search() -> None:
    units = [first_block(configured(method=m))[0].chain.units[BLOCK].module for m in ("qdrop", "rtn")]
    for (_, kept), (_, searched) in zip(*map(quantized_layers, units), strict=True):
        assert torch.equal(kept.codes, searched.codes)
        assert torch.equal(kept.weight, searched.weight)
    for (_, kept), (_, searched) in zip(*map(activation_quantizers, units), strict=True):
        assert torch.equal(kept.scale, searched.scale)


def test_brecq_on_fewer_gradients_than_images_reads_no_memory_it_never_wrote() -> None:
    torch.use_deterministic_algorithms(True)  # which fills fresh memory with NaN
    try:
        _, result = first_block(configured(method="brecq", fisher_size=16))
    finally:
        torch.use_deterministic_algorithms(False)
    assert result.finite


def test_a_walk_on_disk_gives_the_bits_of_one_in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def weights() -> list[Tensor]:
        module = first_block(configured())[0].chain.units[BLOCK].module
        return [layer.weight for _, layer in quantized_layers(module)]

    in_memory = weights()
    monkeypatch.setattr("fimaq.reconstruct.cache.free_bytes", lambda device: 0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert same(weights(), in_memory)
