"""Averages over the calibration set of perturbations and KL gradients: Eq. (13), by running only the suffix."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fimaq.config import Averages
from fimaq.fisher.divergence import kl_gradient
from fimaq.ranks import ALONE, Ranks


@dataclass
class Sample:
    """A batch of n images at one unit: its full-precision inputs and outputs, and the model's logits.

    `carried`: outputs of earlier units that the suffix still reads, by number.
    """

    start: int
    inputs: list[Tensor]
    outputs: list[Tensor]
    teacher: Tensor
    carried: dict[int, list[Tensor]] = field(default_factory=dict)


def flat(tensors: list[Tensor]) -> Tensor:
    """A unit's outputs as one vector per image: [(n, ...), ...] -> (n, a)."""
    parts = [t.flatten(1) for t in tensors]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def gradient_and_perturbation(
    unit: Callable[[list[Tensor]], list[Tensor]],
    suffix: Callable[[list[Tensor], dict[int, list[Tensor]]], Tensor],
    sample: Sample,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """The KL gradient and the perturbation of the quantized `unit` as it is now, image by image: (n, a) each."""
    with torch.no_grad():
        quantized = unit(sample.inputs)
        delta = flat(quantized) - flat(sample.outputs)
    gradients = kl_gradient(lambda z: suffix(z, sample.carried), quantized, sample.teacher, temperature)
    return flat(gradients), delta


def collect_averages(
    samples: Iterable[Sample],
    evaluate: Callable[[Sample], tuple[Tensor, ...]],
    averages: Averages,
    keep: Callable[[int, Tensor], None] | None = None,
    ranks: Ranks = ALONE,
) -> tuple[Tensor, Tensor]:
    """Averaged gradient and perturbation, (a,) each; `evaluate` gives those of a sample's images.

    `averages` chooses between means of signed values (the paper) and of absolute ones (the released code);
    `keep(start, gradients)` is handed every batch's gradients (n, a) where a method needs them one by one.
    The average is over the samples of all `ranks`. What is not finite counts as zero.
    """
    sums: list[Tensor] = []
    count = 0
    for sample in samples:
        gradient, delta = evaluate(sample)
        gradient, delta = gradient.nan_to_num(0, 0, 0), delta.nan_to_num(0, 0, 0)
        if keep is not None:
            keep(sample.start, gradient)
        parts = [gradient, delta] if averages == "signed" else [gradient.abs(), delta.abs()]
        # In double precision, so that the order of images, which ranks change, does not show in the average.
        found = [part.sum(0, dtype=torch.float64) for part in parts]
        sums = [new + old for new, old in zip(found, sums, strict=True)] if sums else found
        count += len(gradient)
    total = torch.tensor(float(count), device=sums[0].device, dtype=torch.float64)
    ranks.sum_(*sums, total)
    averaged = [(summed / total).to(delta.dtype) for summed in sums]
    return averaged[0], averaged[1]
