"""Which units and layers hurt: each one quantized alone, and how much noise each layer's output carries.

One walk along the units, a few images at a time. Two streams of activations walk side by side, full precision and
quantized; at every unit the quantized unit is also fed with full-precision inputs, and the rest of the model is
run in full precision from its output on. So "only this unit quantized" costs a suffix, not a whole model.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fimaq.fisher.divergence import kl_divergence
from fimaq.models.prepare import Structure
from fimaq.models.products import watched
from fimaq.models.units import Unit, UnitChain
from fimaq.progress import Silent
from fimaq.quant.layers import QUANTIZED
from fimaq.report.distributions import Distribution, distributions_of
from fimaq.report.intervals import standard_error

AT_ONCE = 16
"""Images in a batch; histograms are taken over the first batch."""

Calls = dict[str, tuple[tuple[Tensor, ...], Tensor]]
"""Name of a layer or product -> what it was called with, what it returned."""


@dataclass
class Noise:
    """Power of a signal and of the error on it, summed over images."""

    signal: float = 0.0
    error: float = 0.0

    def add(self, exact: Sequence[Tensor], other: Sequence[Tensor]) -> None:
        for one, two in zip(exact, other, strict=True):
            self.signal += float(one.double().square().sum())
            self.error += float((two.double() - one.double()).square().sum())

    @property
    def decibels(self) -> float:
        """Signal-to-noise ratio; infinite without error."""
        if self.error == 0:
            return math.inf
        return 10 * math.log10(self.signal / self.error) if self.signal > 0 else -math.inf

    @property
    def relative(self) -> float:
        """Size of the error relative to the signal's."""
        return math.sqrt(self.error / self.signal) if self.signal > 0 else math.inf


@dataclass
class UnitSensitivity:
    """What quantizing one unit alone does: to its own output, and to the model's."""

    unit: str
    output: Noise = field(default_factory=Noise)
    divergences: list[float] = field(default_factory=list)
    agreeing: int = 0

    @property
    def kl(self) -> float:
        """Mean KL divergence of the model's output from full precision."""
        return math.fsum(self.divergences) / max(1, len(self.divergences))

    @property
    def kl_error(self) -> float:
        return standard_error(self.divergences)


@dataclass
class LayerNoise:
    """Noise of one quantized layer or product: by its own rounding, and in the wholly quantized model."""

    name: str
    unit: str
    kind: str
    own: Noise = field(default_factory=Noise)
    in_model: Noise = field(default_factory=Noise)
    distributions: list[Distribution] = field(default_factory=list)


@dataclass
class Sensitivity:
    """Of all units and layers in the order they run, over `images` images. `whole`: every unit quantized."""

    units: list[UnitSensitivity]
    layers: list[LayerNoise]
    whole: UnitSensitivity
    images: int


Observe = Callable[[Tensor, Tensor, Tensor], None]
"""Called with images (n, C, H, W), full-precision logits and quantized ones (n, classes)."""


@torch.no_grad()
def measure_sensitivity(
    twin: nn.Module,
    quantized: nn.Module,
    structure: Structure,
    images: Tensor,
    progress: Silent | None = None,
    observe: Observe | None = None,
) -> Sensitivity:
    """Walk `images` (n, C, H, W) through a quantized model and its full-precision twin (report/twin.py)."""
    progress = progress or Silent()
    device = next(twin.parameters()).device
    walk = _Walk(twin, quantized, structure, images[[0, -1]].to(device))
    steps, done = -(-len(images) // AT_ONCE) * len(walk.chain), 0
    progress.start(f"sensitivity of {len(walk.chain)} units, {len(images)} images", steps)
    for start in range(0, len(images), AT_ONCE):
        batch = images[start : start + AT_ONCE].to(device)
        for index in walk.through(batch, observe):
            done += 1
            progress.update(done, walk.chain.units[index].name)
    return walk.found


class _Walk:
    def __init__(self, twin: nn.Module, quantized: nn.Module, structure: Structure, example: Tensor) -> None:
        self.chain = UnitChain(twin, structure, example)
        self.counterparts = [_counterpart(unit, quantized) for unit in self.chain.units]
        self.layers: dict[str, LayerNoise] = {}
        units = [UnitSensitivity(unit.name) for unit in self.chain.units]
        self.found = Sensitivity(units, [], UnitSensitivity("all"), 0)

    def through(self, batch: Tensor, observe: Observe | None) -> Any:
        """Walk one batch along the chain; yields each unit's index when it is done."""
        chain, last = self.chain, len(self.chain) - 1
        inputs = {"full": chain.first_inputs(batch), "quantized": chain.first_inputs(batch)}
        kept: dict[str, dict[int, list[Tensor]]] = {"full": {}, "quantized": {}}
        teacher = chain.model(batch).float()
        for index, (unit, counterpart) in enumerate(zip(chain.units, self.counterparts, strict=True)):
            carried = {stream: {i: kept[stream][i] for i in unit.carried} for stream in kept}
            outputs = self._compare_layers(index, inputs)
            alone = counterpart(inputs["full"])
            record = self.found.units[index]
            record.output.add(outputs["full"], alone)
            _judge(record, teacher, chain.suffix(index, alone, carried["full"]))
            if index == last:
                logits = chain.suffix(index, outputs["quantized"], carried["quantized"]).float()
                _judge(self.found.whole, teacher, logits)
                if observe is not None:
                    observe(batch, teacher, logits)
            else:
                inputs = {s: chain.next_inputs(index, outputs[s], carried[s]) for s in inputs}
                for stream in kept:
                    kept[stream][index] = outputs[stream]
            yield index
        self.found.images += len(batch)

    def _compare_layers(self, index: int, inputs: dict[str, list[Tensor]]) -> dict[str, list[Tensor]]:
        """Run one unit in both streams, compare what its layers give, and return the unit's outputs."""
        unit, counterpart = self.chain.units[index], self.counterparts[index]
        with watched(unit.module), _recorded(unit.module) as full:
            outputs = {"full": unit(inputs["full"])}
        with watched(counterpart.module), _recorded(counterpart.module) as quantized:
            outputs["quantized"] = counterpart(inputs["quantized"])
        for name, (arguments, exact) in full.items():
            module = counterpart.module.get_submodule(name)
            whole_name = f"{unit.name}.{name}" if name and unit.name else unit.name or name
            if whole_name not in self.layers:  # met in the order they run
                found = distributions_of(unit.module.get_submodule(name), module, arguments)
                layer = LayerNoise(whole_name, unit.name, type(module).__name__, distributions=list(found))
                self.layers[whole_name] = layer
                self.found.layers.append(layer)
            layer = self.layers[whole_name]
            layer.own.add([exact], [module(*arguments)])
            layer.in_model.add([exact], [quantized[name][1]])
        return outputs


def _counterpart(unit: Unit, quantized: nn.Module) -> Unit:
    """The same unit of the quantized model, taking and giving the same tensors."""
    counterpart = Unit(unit.name, quantized.get_submodule(unit.name))
    counterpart.inputs, counterpart.outputs = unit.inputs, unit.outputs
    return counterpart


def _judge(record: UnitSensitivity, teacher: Tensor, logits: Tensor) -> None:
    logits = logits.float()
    record.divergences += kl_divergence(teacher, logits).tolist()
    record.agreeing += int((teacher.argmax(-1) == logits.argmax(-1)).sum())


@contextmanager
def _recorded(module: nn.Module) -> Any:
    """What every quantized layer and product below `module` is called with and returns meanwhile."""
    calls: Calls = {}

    def recorder(name: str) -> Any:
        def record(_: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            calls[name] = (arguments, output)

        return record

    hooks = [m.register_forward_hook(recorder(n)) for n, m in module.named_modules() if isinstance(m, QUANTIZED)]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()
