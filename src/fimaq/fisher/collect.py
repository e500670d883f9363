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


@dataclass
class Collected:
    """Averages over samples, (a,) each: of gradients g and perturbations dz, and of g * dz and dz^2."""

    gradient: Tensor
    perturbation: Tensor
    product: Tensor
    energy: Tensor


def collect_averages(
    unit: Callable[[list[Tensor]], list[Tensor]],
    samples: Iterable[Sample],
    temperature: float,
    averages: Averages,
    keep: Callable[[int, Tensor], None] | None = None,
) -> Collected:
    """Averaged gradient and perturbation of the quantized `unit` as it is now.

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
        parts += [gradient * delta, delta.square()]
        sums = [p.sum(0) + (sums[i] if sums else 0) for i, p in enumerate(parts)]
        count += len(gradient)
    return Collected(*(total / count for total in sums))


def sampled_scores(sample: Sample, count: int, temperature: float) -> Tensor:
    """Random vectors u with E[u u^T] = F for every sample: (n, count, a).

    F = J^T (diag(p) - p p^T) J, and r = (diag(p^1/2) - p p^1/2^T) e with random signs e has that middle part as
    its covariance; u = J^T r takes one backward pass each.
    """
    leaves = [t.detach().requires_grad_() for t in sample.outputs]
    with torch.enable_grad():
        logits = sample.suffix(leaves) / temperature
    p = torch.softmax(logits.detach(), dim=-1)
    rows = []
    for index in range(count):
        signs = torch.randint_like(p, 0, 2) * 2 - 1
        mixed = p.sqrt() * signs
        r = mixed - p * mixed.sum(-1, keepdim=True)
        grads = torch.autograd.grad(logits, leaves, r, retain_graph=index + 1 < count)
        rows.append(flat(list(grads)))
    return torch.stack(rows, 1)
