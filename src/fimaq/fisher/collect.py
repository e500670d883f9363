"""Averages over the calibration set of perturbations and KL gradients: Eq. (13), by running only the suffix."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fimaq.config import Averages
from fimaq.fisher.divergence import kl_gradient


@dataclass
class Sample:
    """A batch of n images at one unit: its full-precision inputs and outputs, and the model's logits."""

    start: int
    inputs: list[Tensor]
    outputs: list[Tensor]
    teacher: Tensor
    suffix: Callable[[list[Tensor]], Tensor]


def flat(tensors: list[Tensor]) -> Tensor:
    """A unit's outputs as one vector per image: [(n, ...), ...] -> (n, a)."""
    parts = [t.flatten(1) for t in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def collect_averages(
    unit: Callable[[list[Tensor]], list[Tensor]],
    samples: Iterable[Sample],
    temperature: float,
    averages: Averages,
    keep: Callable[[int, Tensor], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Averaged gradient and perturbation, (a,) each, of the quantized `unit` as it is now.

    `averages` chooses between means of signed values (the paper) and of absolute ones (the released code);
    `keep(start, gradients)` is handed every batch's gradients (n, a) where a method needs them one by one.
    """
    sums: list[Tensor] = []
    count = 0
    for sample in samples:
        with torch.no_grad():
            quantized = unit(sample.inputs)
            delta = flat(quantized) - flat(sample.outputs)
        gradient = flat(kl_gradient(sample.suffix, quantized, sample.teacher, temperature)).nan_to_num(0, 0, 0)
        if keep is not None:
            keep(sample.start, gradient)
        parts = [gradient, delta] if averages == "signed" else [gradient.abs(), delta.abs()]
        sums = [part.sum(0) + (sums[i] if sums else 0) for i, part in enumerate(parts)]
        count += len(gradient)
    return sums[0] / count, sums[1] / count
