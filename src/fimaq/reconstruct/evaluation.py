"""KL gradients and perturbations of one unit, batch by batch, by running the suffix behind it and back."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from fimaq.fisher.collect import Sample, gradient_and_perturbation
from fimaq.models.units import UnitChain
from fimaq.reconstruct.compiled import Recorded


class Evaluation:
    """Of the unit as it is when called; on a GPU recorded once and then replayed.

    With `half`, products of the suffix are in float16, which has as many digits as tf32 and is twice as fast.
    bfloat16 has three binary digits less: what is rounded off there would drown a small perturbation. But float16
    ends at 65,504. Whoever averages gradients asks `overflowed` afterwards, and after `widen` takes them again.
    """

    def __init__(self, chain: UnitChain, index: int, temperature: float, half: bool = False) -> None:
        self.chain, self.index, self.temperature = chain, index, temperature
        self._record(half)

    def _record(self, half: bool) -> None:
        self.half = half
        self.finite: Tensor | None = None
        self.specs: list[TreeSpec] = []
        self.recorded = Recorded(_on_tensors(self.chain, self.index, self.temperature, half, self.specs))

    def __call__(self, sample: Sample) -> tuple[Tensor, Tensor]:
        """Gradients and perturbations of a sample's images, (n, a) each."""
        tensors, spec = tree_flatten((sample.inputs, sample.outputs, sample.teacher, sample.carried))
        self.specs[:] = [spec]
        gradient, delta = self.recorded(*tensors)
        if self.half:
            finite = gradient.isfinite().all()
            self.finite = finite if self.finite is None else self.finite & finite
        return gradient, delta

    def overflowed(self) -> bool:
        """Whether half precision gave a gradient that is not finite since this was last asked. Waits for a GPU."""
        finite, self.finite = self.finite, None
        return finite is not None and not bool(finite)

    def widen(self) -> None:
        """From here on in full precision."""
        self._record(half=False)


def _on_tensors(
    chain: UnitChain, index: int, temperature: float, half: bool, specs: list[TreeSpec]
) -> Callable[..., tuple[Tensor, Tensor]]:
    """What is recorded. It must not refer to its user (`compiled.py` says why), only to what it needs."""

    def suffix(outputs: list[Tensor], carried: dict[int, list[Tensor]]) -> Tensor:
        with torch.autocast(outputs[0].device.type, torch.float16, enabled=half):
            return chain.suffix(index, outputs, carried)

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        sample = Sample(0, *tree_unflatten(tensors, specs[0]))
        return gradient_and_perturbation(chain.units[index], suffix, sample, temperature)

    return run
