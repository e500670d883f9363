"""The KL divergence between full-precision and perturbed outputs, and its gradient: Eqs. (8) to (10)."""

from collections.abc import Callable

import torch
from torch import Tensor

LOUDEST = 2.0**6
"""About the largest gradient of an output while it goes back: half precision has no numbers below 6e-8."""


def kl_divergence(teacher: Tensor, student: Tensor, temperature: float = 1.0) -> Tensor:
    """D_KL(p(y; z) || p(y; z + dz)) for every sample, Eq. (8). Logits (n, ..., classes) -> (n,).

    In double precision: of a small perturbation it is a small difference of large numbers, and what single
    precision leaves of it may be below zero.
    """
    log_p = torch.log_softmax(teacher.double() / temperature, dim=-1)
    log_q = torch.log_softmax(student.double() / temperature, dim=-1)
    divergence = (log_p.exp() * (log_p - log_q)).flatten(1).sum(1)
    return divergence.to(torch.promote_types(student.dtype, torch.float32))


def kl_gradient(
    suffix: Callable[[list[Tensor]], Tensor],
    perturbed: list[Tensor],
    teacher: Tensor,
    temperature: float = 1.0,
) -> list[Tensor]:
    """The gradient of L_KL at the perturbed outputs z + dz of a unit, sample by sample, Eq. (10).

    To second order in dz it equals F dz. `suffix` maps the unit's outputs (n, ...) to logits (n, classes).
    Gradients go back through it multiplied by a power of two, so that a suffix in half precision loses none.
    """
    leaves = [t.detach().requires_grad_() for t in perturbed]
    with torch.enable_grad():
        outputs = suffix(leaves)
        student = outputs.detach().to(torch.promote_types(outputs.dtype, torch.float32)).requires_grad_()
        (of_outputs,) = torch.autograd.grad(kl_divergence(teacher, student, temperature).sum(), student)
        loudness = _loudness(of_outputs)
        loud = _by_sample(of_outputs, loudness).to(outputs.dtype)
        gradients = torch.autograd.grad(outputs, leaves, loud, allow_unused=True)
    quiet = 1 / loudness
    return [
        torch.zeros_like(t) if g is None else _by_sample(g, quiet) for t, g in zip(leaves, gradients, strict=True)
    ]


def _loudness(gradients: Tensor) -> Tensor:
    """The power of two for each sample that makes its largest gradient about LOUDEST: (n, ...) -> (n,)."""
    largest = gradients.flatten(1).abs().amax(1).clamp_min(1e-30)
    return LOUDEST / torch.exp2(largest.log2().ceil())


def _by_sample(x: Tensor, factors: Tensor) -> Tensor:
    """Each sample of x (n, ...) times its factor (n,)."""
    return x * factors.to(x.dtype).view(-1, *[1] * (x.dim() - 1))
