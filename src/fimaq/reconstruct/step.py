"""One step of block reconstruction: QDrop inputs, forward, loss, backward, two optimisers, their schedules.

Everything a step reads and writes is a tensor at a fixed address, the iteration counter included, so on a GPU
the step is recorded once as a CUDA graph and then replayed: hundreds of small kernels cost one launch.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fimaq.config import Config
from fimaq.fisher.collect import flat
from fimaq.models.units import Unit
from fimaq.quant.fake import random_mask
from fimaq.quant.layers import activation_quantizers, quantized_layers
from fimaq.quant.quantizers import rounding_indecision

SHARPEST, BLUNTEST = 20.0, 2.0
"""The exponent of the rounding penalty falls from the first to the second after the warm-up."""
EAGER_STEPS = 3
"""Steps before a CUDA graph is recorded: libraries set themselves up during them."""

Objective = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class ReconstructionStep:
    """Learns the rounding of a unit's weights and the scales of its activations."""

    def __init__(self, unit: Unit, objective: Objective, config: Config, device: torch.device) -> None:
        self.unit = unit
        self.objective = objective
        self.config = config
        self.layers = [layer for _, layer in quantized_layers(unit.module)]
        for layer in self.layers:
            layer.weight_quantizer.start_learning(layer.weight)
        self.roundings = [_required(layer.weight_quantizer.rounding) for layer in self.layers]
        self.quantizers = [q for _, q in activation_quantizers(unit.module)]
        self.scales = [q.scale for q in self.quantizers]
        self.searched = [scale.clone() for scale in self.scales]
        self.smallest = [scale / 100 for scale in self.scales]
        for parameter in self.parameters:
            parameter.requires_grad_()
        on_gpu = device.type == "cuda"
        self.scale_lr = torch.tensor(config.resolved_scale_lr, device=device)
        self.optimisers = [
            torch.optim.Adam(self.roundings, lr=config.resolved_rounding_lr, fused=True, capturable=on_gpu),
            torch.optim.Adam(self.scales, lr=self.scale_lr, fused=True, capturable=on_gpu),
        ]
        self.iteration = torch.zeros((), device=device)
        self.loss = torch.zeros((), device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._graph_inputs: list[Tensor] = []
        self._steps = 0
        self._on_gpu = on_gpu

    @property
    def parameters(self) -> list[Tensor]:
        return [*self.roundings, *self.scales]

    def __call__(
        self, raw: list[Tensor], quantized: list[Tensor], targets: list[Tensor], weights: list[Tensor]
    ) -> None:
        """One step on a batch: full-precision and quantized-prefix inputs, full-precision outputs."""
        self._steps += 1
        if not self._on_gpu or self._steps <= EAGER_STEPS:
            self._step(raw, quantized, targets, weights)
            return
        batch = [*raw, *quantized, *targets, *weights]
        if self._graph is None:
            self._record(batch, [len(raw), len(quantized), len(targets), len(weights)])
        assert self._graph is not None
        torch._foreach_copy_(self._graph_inputs, batch)
        self._graph.replay()

    def _record(self, batch: list[Tensor], sizes: list[int]) -> None:
        torch.cuda.synchronize()
        self._graph_inputs = [t.clone() for t in batch]
        parts = iter(self._graph_inputs)
        lists = [[next(parts) for _ in range(size)] for size in sizes]
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._step(*lists)

    def _step(
        self, raw: list[Tensor], quantized: list[Tensor], targets: list[Tensor], weights: list[Tensor]
    ) -> None:
        keep = self.config.drop_probability
        inputs = [torch.where(random_mask(r, keep), r, q) for r, q in zip(raw, quantized, strict=True)]
        target = flat(targets)
        with torch.enable_grad(), self._dropping(keep):
            deltas = flat(self.unit(inputs)) - target
            loss = self.objective(deltas, target, weights[0] if weights else None)
            gradients = torch.autograd.grad(loss + self._rounding_penalty(), self.parameters)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        self.iteration += 1
        share = (self.iteration / self.config.iters).clamp(max=1)
        self.scale_lr.copy_(self.config.resolved_scale_lr * 0.5 * (1 + torch.cos(math.pi * share)))
        for optimiser in self.optimisers:
            optimiser.step()
        with torch.no_grad():
            torch._foreach_maximum_(self.scales, self.smallest)
        self.loss.copy_(loss.detach())

    def _dropping(self, probability: float) -> "_Dropping":
        return _Dropping(self.quantizers, probability)

    def _rounding_penalty(self) -> Tensor:
        """AdaRound's regulariser, 0 until the warm-up ends: sum of 1 - |2 h(V) - 1|^b."""
        share = self.iteration / self.config.iters
        progress = ((share - self.config.warmup) / (1 - self.config.warmup)).clamp(0, 1)
        exponent = SHARPEST + (BLUNTEST - SHARPEST) * progress
        weight = self.config.rounding_weight * (share >= self.config.warmup)
        undecided = [rounding_indecision(rounding, exponent) for rounding in self.roundings]
        return weight * torch.stack(undecided).sum()

    def finish(self) -> bool:
        """Leave what was learned in the quantizers. False when it ran away: range search is kept instead."""
        finite = all(bool(p.isfinite().all()) for p in self.parameters)
        if not finite:
            for layer in self.layers:
                layer.weight_quantizer.rounding = None
        for quantizer, scale, searched in zip(self.quantizers, self.scales, self.searched, strict=True):
            quantizer.scale = scale.detach() if finite else searched
        self._graph = None
        return finite


class _Dropping:
    """Sets QDrop's probability in the unit's activation quantizers for the length of a step."""

    def __init__(self, quantizers: list, probability: float) -> None:
        self.quantizers, self.probability = quantizers, probability

    def __enter__(self) -> None:
        for quantizer in self.quantizers:
            quantizer.drop_probability = self.probability

    def __exit__(self, *_: object) -> None:
        for quantizer in self.quantizers:
            quantizer.drop_probability = 0.0


def _required(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor
