"""Algorithm 1 of the paper: reconstruct the units of a model one after the other."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fimaq.calibrate.ranges import set_ranges
from fimaq.calibrate.reciprocals import make_scales_divisible
from fimaq.calibrate.ties import avoid_ties
from fimaq.config import Config
from fimaq.fisher.collect import Sample, collect_averages, flat
from fimaq.models.units import Unit, UnitChain
from fimaq.quant.layers import activation_quantizers, quantized_layers, set_quantized
from fimaq.reconstruct.cache import ActivationCache
from fimaq.reconstruct.evaluation import Evaluation
from fimaq.reconstruct.memory import affordable_sweep, looked_at
from fimaq.reconstruct.objectives import (
    FisherLoss,
    MeanSquaredError,
    OutputDivergence,
    SquaredGradient,
)
from fimaq.reconstruct.plan import REFRESH, STEPS, images_for
from fimaq.reconstruct.step import ReconstructionStep

REPORTS = 25

Report = Callable[[int, float], None]


@dataclass
class UnitResult:
    """What happened to one unit: loss curve, as (iteration, loss relative to the start), and its verdict."""

    losses: list[tuple[int, float]]
    finite: bool
    flipped: int
    weights: int
    scale_changes: dict[str, float] = field(default_factory=dict)
    """Activation quantizer -> relative change of its scale (mean, if several) from range search to the end."""


class Reconstruction:
    """The state that walks along the chain: cached activations of the unit in work, teacher outputs."""

    def __init__(
        self,
        chain: UnitChain,
        images: Tensor,
        config: Config,
        cache: ActivationCache,
        stage: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.chain = chain
        self.stage = stage
        self.config = config
        self.cache = cache
        self.device = cache.device
        self.ranks = cache.ranks
        self.looked_at = max(looked_at(images), self.ranks.size)
        affordable = affordable_sweep(chain, images[:4].to(self.device), config.memory_budget)
        self.sweep = min(self.ranks.collect(affordable))
        with torch.no_grad():
            for start, stop in self._sweep():
                batch = images[start:stop].to(self.device)
                cache.write("teacher", start, [chain.model(batch)])
            for start, stop in self._sweep(self.needed(0)):
                inputs = chain.first_inputs(images[start:stop].to(self.device))
                cache.write("raw inputs", start, inputs, self.needed(0))
                cache.write("quantized inputs", start, inputs, self.needed(0))

    def needed(self, index: int) -> int:
        """The number of images whose activations are cached at unit `index`."""
        return images_for(self.chain, index, self.config, self.cache.count, self.looked_at)

    def reconstruct(self, index: int, report: Report) -> UnitResult:
        """Algorithm 1 for one unit. Afterwards its weights are integers and its activations quantized."""
        unit = self.chain.units[index]
        self.cache_full_precision(index)
        self.search_ranges(unit)
        if self.config.method == "rtn" or not unit.reconstructed:
            return self._harden(unit, [], True)

        searched = scales_of(unit.module)
        torch.manual_seed(self.config.seed * 1009 + index)
        objective = self.objective(index)
        step = ReconstructionStep(unit, objective, self.config, self.cache)
        evaluate, due = self.evaluation(index), _refresh_iterations(objective, self.config)

        def refresh() -> None:
            self.stage(REFRESH)
            self.refresh(index, objective, evaluate)
            self.stage(STEPS)

        self.stage(STEPS)
        losses = learn(step, self.config.iters, report, due, refresh)
        result = self._harden(unit, losses, step.finish())
        result.scale_changes = scale_changes(searched, unit.module)
        return result

    def advance(self, index: int) -> None:
        """Move the cache from unit `index` to the next one: outputs become the inputs of what follows."""
        unit = self.chain.units[index]
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what was recorded for this unit is gone, and its memory comes back only so
        if index + 1 < len(self.chain):
            for prefix in ("raw", "quantized"):
                for start, stop in self._sweep(self.needed(index + 1)):
                    outputs = self._outputs_of(index, prefix, start, stop)
                    carried = self._carried(index, prefix, start, stop)
                    with torch.no_grad():
                        inputs = self.chain.next_inputs(index, outputs, carried)
                    self.cache.write(f"next {prefix}", start, inputs, self.needed(index + 1))
                    if any(index in later.carried for later in self.chain.units):
                        self.cache.write(f"{prefix} output {index}", start, outputs, self.needed(index + 1))
                self.cache.rename(f"next {prefix}", f"{prefix} inputs")
        for name in ("outputs", "gradients"):
            self.cache.drop(name)
        for earlier in unit.carried:
            if not any(earlier in later.carried for later in self.chain.units[index + 1 :]):
                self.cache.drop(f"raw output {earlier}")
                self.cache.drop(f"quantized output {earlier}")

    def images_and_teacher(self, images: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of calibration images with the full-precision logits for them."""
        for start, stop in self._sweep():
            yield images[start:stop].to(self.device), self.cache.rows("teacher", start, stop)[0]

    @torch.no_grad()
    def cache_full_precision(self, index: int) -> None:
        """Fill the cache with the unit's full-precision outputs, before its weights are replaced."""
        unit = self.chain.units[index]
        set_quantized(unit.module, False)
        for start, stop in self._sweep(self.needed(index)):
            outputs = unit(self.cache.rows("raw inputs", start, stop))
            self.cache.write("outputs", start, outputs, self.needed(index))

    @torch.no_grad()
    def _outputs_of(self, index: int, prefix: str, start: int, stop: int) -> list[Tensor]:
        if prefix == "raw":
            return self.cache.rows("outputs", start, stop)
        return self.chain.units[index](self.cache.rows("quantized inputs", start, stop))

    def _carried(self, index: int, prefix: str, start: int, stop: int) -> dict[int, list[Tensor]]:
        return {i: self.cache.rows(f"{prefix} output {i}", start, stop) for i in self.chain.units[index].carried}

    def search_ranges(self, unit: Unit) -> None:
        """Set all ranges of the unit, which is quantized from then on."""

        images = min(self.cache.count, self.config.search_size)
        sweeps = [range(first, min(first + self.sweep, images)) for first in range(0, images, self.sweep)]

        def run() -> None:
            for sweep in sweeps:
                start, stop = self.ranks.share(sweep.start), self.ranks.share(sweep.stop)
                if start < stop:
                    unit(self.cache.rows("raw inputs", start, stop))

        relative, bounded = self.config.relative_errors, self.config.memory_budget is not None
        set_ranges(unit.module, run, self.config.preset, relative, bounded, self.ranks, sweeps)
        set_quantized(unit.module, True)

    def objective(self, index: int) -> nn.Module:
        """The method's loss for this unit; the head, having no suffix, gets the KL divergence itself."""
        method = self.config.method
        deltas, targets = self._first_deltas(index)
        if method == "qdrop":
            return MeanSquaredError(deltas, self.ranks.mean)
        if index == len(self.chain) - 1:
            return OutputDivergence(self.config.temperature, deltas, targets, self.ranks.mean)
        if method == "brecq":
            return SquaredGradient(self.device)
        alone = self.ranks.size == 1 and self.config.parts in (None, 1)
        return FisherLoss(self.config, deltas.shape[1], self.device, self.ranks.mean, alone)

    @torch.no_grad()
    def _first_deltas(self, index: int) -> tuple[Tensor, Tensor]:
        """Perturbations and full-precision outputs (n, a) of a few images, as the unit is now."""
        stop = self.ranks.share(min(self.cache.count, self.config.batch_size))
        targets = flat(self.cache.rows("outputs", 0, stop))
        return flat(self.chain.units[index](self.cache.rows("quantized inputs", 0, stop))) - targets, targets

    def evaluation(self, index: int) -> Evaluation:
        half = self.config.precision == "bf16" and self.device.type == "cuda"
        return Evaluation(self.chain, index, self.config.temperature, half)

    def refresh(self, index: int, objective: nn.Module, evaluate: Evaluation) -> None:
        """Collect one more averaged perturbation and KL gradient from the unit as it is now."""
        deltas, _ = self._first_deltas(index)
        one_by_one = isinstance(objective, SquaredGradient)
        limit = None if one_by_one else self.config.fisher_size
        keep = (lambda start, g: self.cache.write("gradients", start, [g])) if one_by_one else None

        def averages() -> tuple[Tensor, Tensor]:
            return collect_averages(self._samples(index, limit), evaluate, self.config.averages, keep, self.ranks)

        gradient, perturbation = averages()
        if any(self.ranks.collect(evaluate.overflowed())):
            evaluate.widen()
            gradient, perturbation = averages()
        if isinstance(objective, SquaredGradient):
            weights = self.cache.rows("gradients", 0, len(deltas))[0]
            first = self.ranks.mean((deltas * weights).square().sum(1))
            objective.normaliser.copy_(first.clamp_min(1e-38))
        elif isinstance(objective, FisherLoss):
            objective.collect(gradient, perturbation, deltas)

    def _samples(self, index: int, limit: int | None) -> Iterator[Sample]:
        for start, stop in self._sweep(limit):
            yield Sample(
                start,
                self.cache.rows("raw inputs", start, stop),
                self.cache.rows("outputs", start, stop),
                self.cache.rows("teacher", start, stop)[0],
                self._carried(index, "raw", start, stop),
            )

    def _sweep(self, limit: int | None = None) -> Iterator[tuple[int, int]]:
        """Ranges of this rank's images, a few at a time; of the first `limit` images of all ranks together."""
        count = self.ranks.share(min(self.cache.count, limit or self.cache.count))
        return ((start, min(start + self.sweep, count)) for start in range(0, count, self.sweep))

    @torch.no_grad()
    def _harden(self, unit: Unit, losses: list[tuple[int, float]], finite: bool) -> UnitResult:
        """Fix the integers, and count how many differ from rounding to nearest."""
        layers = [layer for _, layer in quantized_layers(unit.module)]
        flipped = sum(layer.harden() for layer in layers)
        if self.config.preset == "deploy":  # what is exported

            def run() -> None:
                for start, stop in self._sweep(self.looked_at):
                    unit(self.cache.rows("quantized inputs", start, stop))

            make_scales_divisible(unit.module)
            avoid_ties(unit.module, run, self.ranks, keep_on_host=self.config.memory_budget is not None)
        return UnitResult(losses, finite, flipped, sum(layer.weight.numel() for layer in layers))


def learn(
    step: ReconstructionStep,
    iterations: int,
    report: Report,
    due: Collection[int] = (),
    refresh: Callable[[], None] = lambda: None,
) -> list[tuple[int, float]]:
    """Take all steps, with a refresh before those that are `due`. Returns the loss curve."""
    reported, losses = _report_iterations(iterations), list[tuple[int, float]]()
    for iteration in range(iterations):
        if iteration in due:
            refresh()
        step()
        if iteration in reported:
            losses.append((iteration, step.loss))
            report(*losses[-1])
    return losses


def scales_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: quantizer.scale.detach().clone() for name, quantizer in activation_quantizers(module)}


def scale_changes(before: dict[str, Tensor], module: nn.Module) -> dict[str, float]:
    """Relative change of each activation's scale since `before`, the mean where it has several."""
    return {name: float((scale / before[name] - 1).mean()) for name, scale in scales_of(module).items()}


def _refresh_iterations(objective: nn.Module, config: Config) -> set[int]:
    """When perturbations are collected: every iters / rank iterations for a growing rank, once, or never."""
    if isinstance(objective, FisherLoss):
        return {j * config.iters // config.resolved_rank for j in range(config.resolved_rank)}
    return {0} if isinstance(objective, SquaredGradient) else set()


def _report_iterations(iters: int) -> set[int]:
    """When the loss is read back, which waits for the GPU: REPORTS times at most, first and last included."""
    return {j * (iters - 1) // (REPORTS - 1) for j in range(REPORTS)}
