"""What a unit's reconstruction minimises: MSE, BRECQ's diagonal, or one of the paper's Fisher losses.

An objective is fed averaged gradients and perturbations as they are collected (`collect`) and then maps the
perturbations of a batch (n, a) to a loss. Losses are divided by their value when they were last collected, so
that one weight of the rounding penalty suits every unit, model and method, and so that the two terms of DPLR
are of one size whatever their units.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fimaq.config import Averages, Config
from fimaq.fisher.approximations import (
    combined,
    diagonal_fisher,
    diagonal_loss,
    inverse_gram,
    inverse_root,
    low_rank_loss,
    rank_one_fisher,
    rank_one_loss,
)
from fimaq.fisher.divergence import kl_divergence

Mean = Callable[[Tensor], Tensor]
"""Of the elements of a tensor, or of what several ranks have of it together."""


class MeanSquaredError(nn.Module):
    """QDrop: every output counts the same."""

    normaliser: Tensor

    def __init__(self, first_deltas: Tensor, mean: Mean = torch.mean) -> None:
        super().__init__()
        self.register_buffer("normaliser", mean(first_deltas.square()).clamp_min(1e-38))

    def forward(self, deltas: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        return deltas.square().mean() / self.normaliser


class OutputDivergence(nn.Module):
    """The head: its output is the model's, so the KL divergence itself is minimised."""

    normaliser: Tensor

    def __init__(self, temperature: float, first_deltas: Tensor, targets: Tensor, mean: Mean = torch.mean) -> None:
        super().__init__()
        self.temperature = temperature
        first = mean(kl_divergence(targets, targets + first_deltas, temperature))
        self.register_buffer("normaliser", first.clamp_min(1e-38))

    def forward(self, deltas: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        return kl_divergence(targets, targets + deltas, self.temperature).mean() / self.normaliser


class SquaredGradient(nn.Module):
    """BRECQ: squared gradients, each sample's own, as a diagonal Fisher matrix."""

    normaliser: Tensor

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("normaliser", torch.ones((), device=device))

    def forward(self, deltas: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        assert weights is not None
        return (deltas * weights).square().sum(1).mean() / self.normaliser


class FisherLoss(nn.Module):
    """Diag-FIM, rank-one, LR-FIM and DPLR-FIM, under either reading of the averages over samples.

    `signed` is the paper's text. `absolute` is what the authors' released code computes: averages of absolute
    values, a low-rank term A B A^T with A = |dz| G^T, and a diagonal of mean |gradient|. So either the rows of
    `left` are gradients and `right` is B times the perturbations, or `left` is the root of B times the gradients,
    and there is no `right`.
    Tensors are allocated for the full rank at once and filled row by row: their addresses never change, so a
    recorded CUDA graph of the reconstruction step goes on seeing what is collected later.
    """

    directions: Tensor
    perturbations: Tensor
    ratios: Tensor
    left: Tensor
    right: Tensor | None
    diagonal: Tensor
    direction: Tensor
    normalisers: Tensor

    def __init__(
        self, config: Config, size: int, device: torch.device, mean: Mean = torch.mean, alone: bool = True
    ) -> None:
        """`alone`: no other rank, and no other part of the batch, has rows of the same mean."""
        super().__init__()
        self.mean, self.alone = mean, alone
        self.terms = _terms(config)
        self.averages: Averages = config.averages
        # Rows of zeros change nothing. With a multiple of 16 rows, products are aligned as GPUs like it, and all
        # ranks up to 16 share one compiled step.
        rows = -(-config.resolved_rank // 16) * 16
        self.collected = 0
        self.register_buffer("directions", torch.zeros(rows, size, device=device))
        self.register_buffer("perturbations", torch.zeros(rows, size, device=device))
        self.register_buffer("ratios", torch.zeros(rows, dtype=torch.float64, device=device))
        signed = config.averages == "signed"
        self.register_buffer("left", torch.zeros(rows, size, device=device))
        self.register_buffer("right", torch.zeros(rows, size, device=device) if signed else None)
        self.register_buffer("diagonal", torch.zeros(size, device=device))
        self.register_buffer("direction", torch.zeros(size, device=device))
        self.register_buffer("normalisers", torch.ones(len(self.terms), device=device))

    def collect(self, gradient: Tensor, perturbation: Tensor, deltas: Tensor) -> None:
        """Add one averaged gradient (a,) and perturbation (a,); renormalise on current `deltas` (n, a)."""
        row = self.collected
        self.collected += 1
        # Losses are relative, and a pair of rows may be scaled together: so perturbations are kept at unit
        # length and gradients at most there, and no product of them leaves the range of float32.
        gradient_size, perturbation_size = _length(gradient), _length(perturbation)
        self.directions[row] = gradient / gradient_size
        self.perturbations[row] = perturbation / perturbation_size
        self.ratios[row] = torch.where(perturbation.any(), gradient_size / perturbation_size, 0)
        sizes = self.ratios / self.ratios.max().clamp_min(1e-300)
        directions, perturbations, sizes = (t[: row + 1] for t in (self.directions, self.perturbations, sizes))
        if self.right is None:
            self.diagonal.copy_(directions.mean(0))
            self.left[: row + 1] = combined(inverse_root(perturbations) * sizes, directions)
        else:
            self.left[: row + 1] = directions * sizes[:, None]
            self.diagonal.copy_(diagonal_fisher(self.left[: row + 1], perturbations))
            self.right[: row + 1] = combined(inverse_gram(perturbations), perturbations)
        self.direction.copy_(rank_one_fisher(directions[row] * sizes[row], perturbations[row]))
        # Row by row unless alone: a row's bits must not depend on how many others this rank has beside it.
        rows = deltas.split(len(deltas) if self.alone else 1)
        by_row = {name: torch.cat([self._term(name, some) for some in rows]) for name in self.terms}
        values = torch.stack([self.mean(of_rows) for of_rows in by_row.values()])
        self.normalisers.copy_(values.clamp_min(1e-38))

    def forward(self, deltas: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        losses = [weight * self._term(name, deltas).mean() for name, weight in self.terms.items()]
        return (torch.stack(losses) / self.normalisers).sum()

    def _term(self, name: str, deltas: Tensor) -> Tensor:
        """One term for every sample: (n, a) -> (n,), never negative."""
        deltas = deltas.abs() if self.averages == "absolute" else deltas
        if name == "diagonal":
            return diagonal_loss(deltas, self.diagonal)
        if name == "identity":
            return deltas.square().sum(1)
        if name == "rank one":
            return rank_one_loss(deltas, self.direction)
        # Without symmetry the quadratic form can be negative; its size is what must shrink.
        return low_rank_loss(deltas, *self.sides).abs()

    @property
    def sides(self) -> tuple[Tensor, Tensor]:
        """The factors of the low-rank matrix F = left^T right: (k, a) each."""
        return self.left, self.left if self.right is None else self.right


def _length(row: Tensor) -> Tensor:
    """The norm, in double precision; 1 for a row of zeros, so that it can be divided by."""
    length = row.double().norm()
    return torch.where(length > 0, length, 1.0)


def _terms(config: Config) -> dict[str, float]:
    """The terms of a method and their weights: DPLR is alpha * low rank + (1 - alpha) * diagonal, Eq. (21).

    A damped matrix has a share of the identity, so that what the Fisher information does not show counts too.
    """
    terms = {
        "diag": {"diagonal": 1.0},
        "rank1": {"rank one": 1.0},
        "lowrank": {"low rank": 1.0},
        "fima-q": {"low rank": config.alpha, "diagonal": 1 - config.alpha},
    }[config.method]
    damping = config.resolved_damping
    damped = {**{name: (1 - damping) * weight for name, weight in terms.items()}, "identity": damping}
    return {name: weight for name, weight in damped.items() if weight > 0}
