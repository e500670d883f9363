"""The approximations of the Fisher information matrix F of section 3.3, and the losses they give.

Notation: a is the size of a unit's output for one image, k the rank. `gradients` and `perturbations` are
(k, a): row j holds the averages, over samples, of the j-th collected gradient of L_KL and of the j-th
collected perturbation dz, Eq. (13). `deltas` (n, a) are the perturbations dz^(b,i) whose loss is wanted.
Every function is defined for zero or collinear perturbations: what they do not determine is taken as zero.
"""

import torch
from torch import Tensor

TINY = 1e-12
COLLINEAR = 1e-6
"""Directions of the perturbations weaker than this share of the strongest count as not collected."""


def diagonal_fisher(gradients: Tensor, perturbations: Tensor) -> Tensor:
    """F_diag: (k, a), (k, a) -> (a,), Eq. (11).

    For k = 1 it is gradient / perturbation; for more rows the least-squares diagonal that maps them. Since F is
    positive semi-definite, entries that come out negative are set to zero.
    """
    energy = perturbations.square().sum(0)
    mapped = (gradients * perturbations).sum(0)
    return torch.where(energy > TINY * energy.max(), mapped / energy.clamp_min(1e-38), 0).clamp_min(0)


def rank_one_fisher(gradient: Tensor, perturbation: Tensor) -> Tensor:
    """u with F = u u^T: (a,), (a,) -> (a,), Eq. (15). Zero where gradient and perturbation disagree."""
    agreement = gradient @ perturbation
    return torch.where(agreement > 0, gradient / agreement.clamp_min(1e-38).sqrt(), 0)


def inverse_gram(perturbations: Tensor) -> Tensor:
    """B = (dz^T dz)^-1 of Eq. (19) as a Moore-Penrose inverse: (k, a) -> (k, k).

    In double precision: perturbations of successive refreshes are nearly collinear.
    """
    rows = perturbations.double()
    return torch.linalg.pinv(rows @ rows.T, hermitian=True, rtol=COLLINEAR).to(perturbations.dtype)


def rank_k_fisher(gradients: Tensor, perturbations: Tensor) -> Tensor:
    """F_rank-k = gradient dz^+ written out, (a, a), Eq. (17). For reading and testing: a is large."""
    rows = perturbations.double()
    return (gradients.double().T @ inverse_gram(rows) @ rows).to(gradients.dtype)


def diagonal_loss(deltas: Tensor, diagonal: Tensor) -> Tensor:
    """L_diag for every sample, Eq. (14): (n, a), (a,) -> (n,)."""
    return deltas.square() @ diagonal


def rank_one_loss(deltas: Tensor, u: Tensor) -> Tensor:
    """L_rank-1 for every sample, Eq. (16): (n, a), (a,) -> (n,)."""
    return (deltas @ u).square()


def low_rank_loss(deltas: Tensor, left: Tensor, middle: Tensor, right: Tensor) -> Tensor:
    """L_rank-k = A B C for every sample, Eqs. (18, 19): A = deltas left^T, C = right deltas^T -> (n,)."""
    first = deltas @ left.T
    last = first if right is left else deltas @ right.T
    return ((first @ middle) * last).sum(1)
