"""The approximations of the Fisher information matrix F of section 3.3, and the losses they give.

Notation: a is the size of a unit's output for one image, k the rank. `gradients` and `perturbations` are
(k, a): row j holds the averages, over samples, of the j-th collected gradient of L_KL and of the j-th
collected perturbation dz, Eq. (13). `deltas` (n, a) are the perturbations dz^(b,i) whose loss is wanted.
Every function is defined for zero or collinear perturbations: what they do not determine is taken as zero.
"""

import torch
from torch import Tensor

TINY = 1e-12
PIECE = 256
"""Elements of a row, at most, that a GPU multiplies at a time."""
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


def inverse_root(perturbations: Tensor) -> Tensor:
    """R with R^T R = B = (dz^T dz)^-1 of Eq. (19), as a Moore-Penrose inverse: (k, a) -> (k, k), float64.

    In double precision: perturbations of successive refreshes are nearly collinear. Eigenvalues on the CPU, which
    finds those of so small a matrix sooner than a GPU does.
    """
    rows = perturbations.double()
    sizes, directions = (found.to(rows.device) for found in torch.linalg.eigh((rows @ rows.T).cpu()))
    collected = sizes > COLLINEAR * sizes.max()
    return (directions * torch.where(collected, sizes.clamp_min(1e-300).rsqrt(), 0)).T


def inverse_gram(perturbations: Tensor) -> Tensor:
    """B of Eq. (19): (k, a) -> (k, k), float64."""
    root = inverse_root(perturbations)
    return root.T @ root


def combined(coefficients: Tensor, rows: Tensor) -> Tensor:
    """coefficients (m, k) @ rows (k, a), whatever precision a GPU is told to multiply matrices with.

    Nearly collinear rows cancel here, and what is left must not be made of their rounding errors.
    """
    result = rows.new_zeros(len(coefficients), rows.shape[1])
    for column, row in zip(coefficients.to(rows.dtype).T, rows, strict=True):
        result.addr_(column, row)
    return result


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


def low_rank_loss(deltas: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """L_rank-k = A B C for every sample, Eqs. (18, 19): (n, a), (k, a), (k, a) -> (n,).

    A = deltas left^T and B C = right deltas^T: B is multiplied into the rows of `right` beforehand, or its root
    into both sides. Applied to A and C, it would enlarge their rounding errors by its condition number.
    """
    first = _products_of_rows(deltas, left)
    return (first * (first if right is left else _products_of_rows(deltas, right))).sum(1)


def _products_of_rows(few: Tensor, others: Tensor) -> Tensor:
    """few (n, a) @ others^T, for others (k, a): (n, k)."""
    return in_pieces(few, others, aligned_piece(few.shape[1])) if few.is_cuda else few @ others.T


def in_pieces(few: Tensor, others: Tensor, piece: int) -> Tensor:
    """few (n, a) @ others^T as sums over pieces of rows. Libraries are slow at so few rows of so many elements."""
    parts, other_parts = (rows.unflatten(1, (-1, piece)).transpose(0, 1) for rows in (few, others))
    return (parts @ other_parts.mT).sum(0)


def aligned_piece(size: int) -> int:
    """The longest piece of at most PIECE elements that a row can be cut into and a GPU likes; else all of it."""
    return next((piece for piece in range(PIECE, PIECE // 8, -8) if size % piece == 0), size)
