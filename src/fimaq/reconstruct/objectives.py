"""What a unit's reconstruction minimises: MSE, BRECQ's diagonal, or one of the paper's Fisher losses.

An objective is fed averaged gradients and perturbations as they are collected (`collect`) and then maps the
perturbations of a batch (n, a) to a loss. Losses are divided by their value when they were last collected, so
that one weight of the rounding penalty suits every unit, model and method, and so that the two terms of DPLR
are of one size whatever their units.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fimaq.config import Averages, Config
from fimaq.fisher.approximations import (
    diagonal_fisher,
    diagonal_loss,
    inverse_gram,
    low_rank_loss,
    rank_one_fisher,
    rank_one_loss,
)
from fimaq.fisher.collect import Collected
from fimaq.fisher.divergence import kl_divergence

Loss = Callable[[Tensor], Tensor]


class MeanSquaredError:
    """QDrop: every output counts the same."""

    def __init__(self, first_deltas: Tensor) -> None:
        self.normaliser = first_deltas.square().mean().clamp_min(1e-38)

    def __call__(self, deltas: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        return deltas.square().mean() / self.normaliser


class OutputDivergence:
    """The head: its output is the model's, so the KL divergence itself is minimised."""

    def __init__(self, temperature: float, first_deltas: Tensor, targets: Tensor) -> None:
        self.temperature = temperature
        self.normaliser = torch.ones((), device=targets.device)
        self.normaliser = self(first_deltas, targets).clamp_min(1e-38)

    def __call__(self, deltas: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        return kl_divergence(targets, targets + deltas, self.temperature).mean() / self.normaliser


class SquaredGradient:
    """BRECQ: squared gradients, each sample's own, as a diagonal Fisher matrix."""

    def __init__(self) -> None:
        self.normaliser: Tensor | None = None

    def __call__(self, deltas: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        assert weights is not None and self.normaliser is not None
        return (deltas * weights).square().sum(1).mean() / self.normaliser


class SampledFisher:
    """Each sample's own Fisher matrix from a few random scores u (n, k, a), plus their mean diagonal."""

    def __init__(self, alpha: float, diagonal: Tensor) -> None:
        self.alpha = alpha
        self.diagonal = diagonal
        self.normalisers = [torch.ones((), device=diagonal.device) for _ in range(2)]

    def terms(self, deltas: Tensor, weights: Tensor) -> list[Tensor]:
        scores = torch.bmm(weights, deltas.unsqueeze(-1)).square().mean()
        return [scores, diagonal_loss(deltas, self.diagonal).mean()]

    def normalise(self, deltas: Tensor, weights: Tensor) -> None:
        self.normalisers = [t.clamp_min(1e-38) for t in self.terms(deltas, weights)]

    def __call__(self, deltas: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        assert weights is not None
        scores, diagonal = self.terms(deltas, weights)
        return self.alpha * scores / self.normalisers[0] + (1 - self.alpha) * diagonal / self.normalisers[1]


class FisherLoss:
    """Diag-FIM, rank-one, LR-FIM and DPLR-FIM, under either reading of the averages over samples.

    `signed` is the paper's text. `absolute` is what the authors' released code computes: averages of absolute
    values, a low-rank term A B A^T with A = |dz| G^T, and a diagonal of mean |gradient|.
    Tensors are allocated for the full rank at once and filled row by row: their addresses never change, so a
    recorded CUDA graph of the reconstruction step goes on seeing what is collected later.
    """

    def __init__(self, config: Config, size: int, device: torch.device) -> None:
        self.terms = _terms(config)
        self.averages: Averages = config.averages
        rank = config.resolved_rank
        self.collected = 0
        self.gradients = torch.zeros(rank, size, device=device)
        self.perturbations = torch.zeros(rank, size, device=device)
        self.inverse = torch.zeros(rank, rank, device=device)
        self.diagonal = torch.zeros(size, device=device)
        self.sums = torch.zeros(2, size, device=device)
        self.direction = torch.zeros(size, device=device)
        self.normalisers = {name: torch.ones((), device=device) for name in self.terms}

    def collect(self, collected: Collected, deltas: Tensor) -> None:
        """Add one averaged gradient (a,) and perturbation (a,); renormalise on current `deltas` (n, a)."""
        gradient, perturbation = collected.gradient, collected.perturbation
        row = self.collected
        self.collected += 1
        # Only ratios of gradients matter; at unit size no product of them leaves the range of float32.
        self.gradients[row] = gradient / gradient.norm().clamp_min(1e-38)
        self.perturbations[row] = perturbation / gradient.norm().clamp_min(1e-38)
        scale = self.perturbations[: row + 1].abs().amax().clamp_min(1e-38)
        gradients, perturbations = self.gradients[: row + 1], self.perturbations[: row + 1] / scale
        self.inverse[: row + 1, : row + 1] = inverse_gram(perturbations) / scale.square()
        if self.averages == "absolute":
            self.diagonal.copy_(gradients.mean(0))
        elif self.averages == "paired":
            self.sums[0] += collected.product / gradient.norm().clamp_min(1e-38)
            self.sums[1] += collected.energy
            self.diagonal.copy_((self.sums[0] / self.sums[1].clamp_min(1e-38)).clamp_min(0))
        else:
            self.diagonal.copy_(diagonal_fisher(gradients, perturbations))
        self.direction.copy_(rank_one_fisher(self.gradients[row], self.perturbations[row]))
        for name, normaliser in self.normalisers.items():
            normaliser.copy_(self._term(name, deltas).mean().clamp_min(1e-38))

    def __call__(self, deltas: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        losses = [
            weight * self._term(name, deltas).mean() / self.normalisers[name]
            for name, weight in self.terms.items()
        ]
        return torch.stack(losses).sum()

    def _term(self, name: str, deltas: Tensor) -> Tensor:
        """One term for every sample: (n, a) -> (n,), never negative."""
        deltas = deltas if self.averages == "signed" else deltas.abs()
        if name == "diagonal":
            return diagonal_loss(deltas, self.diagonal)
        if name == "rank one":
            return rank_one_loss(deltas, self.direction)
        right = self.perturbations if self.averages == "signed" else self.gradients
        # Without symmetry the quadratic form can be negative; its size is what must shrink.
        return low_rank_loss(deltas, self.gradients, self.inverse, right).abs()


def _terms(config: Config) -> dict[str, float]:
    """The terms of a method and their weights: DPLR is alpha * low rank + (1 - alpha) * diagonal, Eq. (21)."""
    terms = {
        "diag": {"diagonal": 1.0},
        "rank1": {"rank one": 1.0},
        "lowrank": {"low rank": 1.0},
        "fima-q": {"low rank": config.alpha, "diagonal": 1 - config.alpha},
    }[config.method]
    return {name: weight for name, weight in terms.items() if weight > 0}
