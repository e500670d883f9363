"""The KL divergence between full-precision and perturbed outputs, and its gradient: Eqs. (8) to (10)."""

from collections.abc import Callable

import torch
from torch import Tensor


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
    """
    leaves = [t.detach().requires_grad_() for t in perturbed]
    with torch.enable_grad():
        total = kl_divergence(teacher, suffix(leaves), temperature).sum()
        gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, gradients, strict=True)]
