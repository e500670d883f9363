"""The losses of reconstruction: normalised, never negative, finite, and equal to their written definition."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fimaq.config import Config
from fimaq.reconstruct.objectives import FisherLoss, MeanSquaredError, OutputDivergence, SquaredGradient

SIZE = 20
FISHER = ("diag", "rank1", "lowrank", "fima-q")
AVERAGES = ("signed", "absolute")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def fisher_loss(
    method: str, averages: str, rank: int, alpha: float = 0.5, damping: float | None = None
) -> FisherLoss:
    given = {"method": method, "averages": averages, "rank": rank, "alpha": alpha, "damping": damping}
    config = Config.create(**given, calib_size=64, iters=100)
    return FisherLoss(config, SIZE, torch.device("cpu"))


def rows(averages: str, count: int) -> tuple[Tensor, Tensor]:
    """Gradients and perturbations as `averages` delivers them, each gradient in agreement with its partner."""
    root = torch.randn(SIZE, SIZE)
    perturbations = torch.randn(count, SIZE)
    gradients = perturbations @ (root @ root.T) / SIZE
    return (gradients, perturbations) if averages == "signed" else (gradients.abs(), perturbations.abs())


def collected_loss(method: str, averages: str, damping: float | None = None) -> tuple[FisherLoss, Tensor]:
    """A loss fed as often as its rank says, and the deltas it was last normalised with."""
    count = 3 if method in ("lowrank", "fima-q") else 1
    loss = fisher_loss(method, averages, count, 0.3, damping)
    for gradient, perturbation in zip(*rows(averages, count), strict=True):
        deltas = torch.randn(8, SIZE)
        loss.collect(gradient, perturbation, deltas)
    return loss, deltas


def test_mean_squared_error_is_one_on_the_first_deltas() -> None:
    deltas, targets = torch.randn(8, SIZE), torch.randn(8, SIZE)
    assert MeanSquaredError(deltas)(deltas, targets).item() == pytest.approx(1, rel=1e-6)


def test_output_divergence_is_one_on_the_first_deltas() -> None:
    deltas, targets = torch.randn(8, SIZE), torch.randn(8, SIZE)
    assert OutputDivergence(2.0, deltas, targets)(deltas, targets).item() == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("averages", AVERAGES)
@pytest.mark.parametrize("method", FISHER)
def test_fisher_losses_are_one_on_the_deltas_they_were_last_collected_with(method: str, averages: str) -> None:
    loss, deltas = collected_loss(method, averages)
    assert loss(deltas, deltas).item() == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("averages", AVERAGES)
@pytest.mark.parametrize("method", FISHER)
@pytest.mark.parametrize("damping", [0.4, 1.0])
def test_a_damped_loss_has_its_share_of_the_squared_error(damping: float, method: str, averages: str) -> None:
    parts = []
    for share in (damping, 0.0):
        torch.manual_seed(0)
        loss, first = collected_loss(method, averages, share)
        parts.append(loss(first * torch.linspace(0, 2, SIZE), first).item())
    squared = MeanSquaredError(first)(first * torch.linspace(0, 2, SIZE), first).item()
    damped, plain = parts
    assert plain != pytest.approx(squared, rel=1e-3)
    assert damped == pytest.approx((1 - damping) * plain + damping * squared, rel=1e-5)


def test_mean_squared_error_grows_with_the_square_of_the_deltas() -> None:
    first, deltas, targets = torch.randn(8, SIZE), torch.randn(4, SIZE), torch.randn(4, SIZE)
    expected = np.mean(deltas.numpy() ** 2) / np.mean(first.numpy() ** 2)
    assert MeanSquaredError(first)(deltas, targets).item() == pytest.approx(expected, rel=1e-5)


def test_output_divergence_is_the_divergence_relative_to_the_first() -> None:
    def divergence(targets: Tensor, deltas: Tensor) -> Tensor:
        student = F.log_softmax((targets + deltas) / 3, -1)
        return F.kl_div(student, F.softmax(targets / 3, -1), reduction="batchmean")

    first, deltas, targets = torch.randn(8, SIZE), torch.randn(8, SIZE), torch.randn(8, SIZE)
    expected = divergence(targets, deltas) / divergence(targets, first)
    found = OutputDivergence(3.0, first, targets)(deltas, targets)
    assert found.item() == pytest.approx(expected.item(), rel=1e-4)


def test_squared_gradient_weighs_each_sample_with_its_own_gradient() -> None:
    objective = SquaredGradient(torch.device("cpu"))
    objective.normaliser.fill_(2)
    deltas, weights = torch.randn(8, SIZE), torch.randn(8, SIZE)
    expected = sum(float((d * w) @ (d * w)) for d, w in zip(deltas, weights, strict=True)) / 8 / 2
    assert objective(deltas, deltas, weights).item() == pytest.approx(expected, rel=1e-5)


class ByHand:
    """The released reading in float64: A B A^T with A = |dz| G^T and B = (P P^T)^-1; a diagonal of mean |g|."""

    def __init__(self, gradients: Tensor, perturbations: Tensor) -> None:
        self.G, self.P = gradients.double().numpy(), perturbations.double().numpy()

    def low_rank(self, deltas: Tensor) -> float:
        A = np.abs(deltas.double().numpy()) @ self.G.T
        B = np.linalg.inv(self.P @ self.P.T)
        return float(np.mean([np.abs(a @ B @ a) for a in A]))

    def rank_one(self, deltas: Tensor) -> float:
        g, p = self.G[-1], self.P[-1]
        return float(np.mean((np.abs(deltas.double().numpy()) @ g) ** 2 / (g @ p)))

    def diagonal(self, deltas: Tensor) -> float:
        return float(np.mean(deltas.double().numpy() ** 2 @ self.G.mean(0)))


@pytest.mark.parametrize(
    ("method", "term", "count"), [("diag", "diagonal", 1), ("rank1", "rank_one", 1), ("lowrank", "low_rank", 4)]
)
def test_absolute_averages_give_the_released_formulas(method: str, term: str, count: int) -> None:
    gradients, perturbations = rows("absolute", count)
    first, deltas = torch.randn(8, SIZE), torch.randn(8, SIZE)
    loss = fisher_loss(method, "absolute", count)
    for gradient, perturbation in zip(gradients, perturbations, strict=True):
        loss.collect(gradient, perturbation, first)
    by_hand = getattr(ByHand(gradients, perturbations), term)
    assert loss(deltas, deltas).item() == pytest.approx(by_hand(deltas) / by_hand(first), rel=1e-3)


def test_absolute_dplr_mixes_both_terms_each_relative_to_its_start() -> None:
    gradients, perturbations = rows("absolute", 3)
    # Gradients of one size: then it does not matter whether their mean is taken before or after scaling.
    sizes = gradients.norm(dim=1, keepdim=True)
    gradients, perturbations = gradients / sizes, perturbations / sizes
    first, deltas = torch.randn(8, SIZE), torch.randn(8, SIZE)
    loss = fisher_loss("fima-q", "absolute", 3, alpha=0.3)
    for gradient, perturbation in zip(gradients, perturbations, strict=True):
        loss.collect(gradient, perturbation, first)
    by_hand = ByHand(gradients, perturbations)
    low_rank = by_hand.low_rank(deltas) / by_hand.low_rank(first)
    diagonal = by_hand.diagonal(deltas) / by_hand.diagonal(first)
    assert loss(deltas, deltas).item() == pytest.approx(0.3 * low_rank + 0.7 * diagonal, rel=1e-3)


def test_signed_low_rank_is_the_quadratic_form_of_the_paper() -> None:
    gradients, perturbations = rows("signed", 3)
    first, deltas = torch.randn(8, SIZE), torch.randn(8, SIZE)
    loss = fisher_loss("lowrank", "signed", 3)
    for gradient, perturbation in zip(gradients, perturbations, strict=True):
        loss.collect(gradient, perturbation, first)
    fisher = gradients.double().numpy().T @ np.linalg.pinv(perturbations.double().numpy().T)

    def form(values: Tensor) -> float:
        return float(np.mean([abs(d @ fisher @ d) for d in values.double().numpy()]))

    assert loss(deltas, deltas).item() == pytest.approx(form(deltas) / form(first), rel=1e-3)


@pytest.mark.parametrize("averages", AVERAGES)
@pytest.mark.parametrize("method", FISHER)
def test_fisher_losses_are_never_negative(method: str, averages: str) -> None:
    loss, _ = collected_loss(method, averages)
    assert all(loss(deltas[None], deltas[None]).item() >= 0 for deltas in torch.randn(200, SIZE))


@pytest.mark.parametrize("averages", AVERAGES)
@pytest.mark.parametrize("method", FISHER)
def test_fisher_losses_have_finite_gradients_at_zero(method: str, averages: str) -> None:
    loss, _ = collected_loss(method, averages)
    deltas = torch.zeros(8, SIZE, requires_grad=True)
    loss(deltas, deltas).backward()
    assert deltas.grad is not None
    assert deltas.grad.isfinite().all()


def test_the_other_losses_have_finite_gradients_at_zero() -> None:
    targets = torch.randn(8, SIZE)
    squared = SquaredGradient(torch.device("cpu"))
    first = torch.randn(8, SIZE)
    for objective in (MeanSquaredError(first), OutputDivergence(1.0, first, targets), squared):
        deltas = torch.zeros(8, SIZE, requires_grad=True)
        (gradient,) = torch.autograd.grad(objective(deltas, targets, first), deltas)
        assert gradient.isfinite().all()


EDGES = {
    "nothing at all": (0.0, 0.0),
    "no gradient": (0.0, 1.0),
    "no gradient, large outputs": (0.0, 100.0),
    "no perturbation": (1.0, 0.0),
    "tiny gradient": (1e-20, 1.0),
    "vanishing gradient": (1e-36, 100.0),
    "huge gradient": (1e20, 1.0),
    "both tiny": (1e-20, 1e-20),
    "both huge": (1e20, 1e20),
}


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("averages", AVERAGES)
@pytest.mark.parametrize("method", FISHER)
def test_fisher_losses_stay_finite_at_the_edges(method: str, averages: str, edge: str) -> None:
    count = 2 if method in ("lowrank", "fima-q") else 1
    loss = fisher_loss(method, averages, count)
    deltas = torch.randn(8, SIZE)
    for gradient, perturbation in zip(*rows(averages, count), strict=True):
        loss.collect(EDGES[edge][0] * gradient, EDGES[edge][1] * perturbation, deltas)
    leaf = deltas.clone().requires_grad_()
    value = loss(leaf, leaf)
    value.backward()
    assert value.isfinite()
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("size", [1e-20, 1e20])
@pytest.mark.parametrize("method", FISHER)
def test_the_size_of_the_gradients_does_not_matter(method: str, size: float) -> None:
    gradients, perturbations = rows("absolute", 1)
    first, deltas = torch.randn(8, SIZE), torch.randn(8, SIZE)
    values = []
    for factor in (1.0, size):
        loss = fisher_loss(method, "absolute", 1)
        loss.collect(factor * gradients[0], perturbations[0], first)
        values.append(loss(deltas, deltas).item())
    assert values[1] == pytest.approx(values[0], rel=1e-3)


@pytest.mark.parametrize("averages", AVERAGES)
def test_the_same_perturbation_collected_twice_gives_the_loss_of_once(averages: str) -> None:
    gradients, perturbations = rows(averages, 1)
    first, deltas = torch.randn(8, SIZE), torch.randn(8, SIZE)
    values = []
    for times in (1, 2):
        loss = fisher_loss("lowrank", averages, 2)
        for _ in range(times):
            loss.collect(gradients[0], perturbations[0], first)
        values.append(loss(deltas, deltas).item())
    assert values[1] == pytest.approx(values[0], rel=1e-4)


@pytest.mark.parametrize("averages", AVERAGES)
@pytest.mark.parametrize("method", FISHER)
def test_what_is_collected_later_arrives_in_the_same_tensors(method: str, averages: str) -> None:
    """A recorded CUDA graph of the step reads the objective's tensors where they were when it was recorded."""
    count = 3 if method in ("lowrank", "fima-q") else 1
    loss = fisher_loss(method, averages, count)
    held = dict(loss.named_buffers())
    addresses = {name: tensor.data_ptr() for name, tensor in held.items()}
    for gradient, perturbation in zip(*rows(averages, count), strict=True):
        loss.collect(gradient, perturbation, torch.randn(8, SIZE))
    assert {name: tensor.data_ptr() for name, tensor in loss.named_buffers()} == addresses
    deltas = torch.randn(8, SIZE)
    fresh = fisher_loss(method, averages, count)
    assert torch.equal(torch.func.functional_call(fresh, held, (deltas, deltas)), loss(deltas, deltas))


def test_signed_dplr_mixes_the_low_rank_and_the_diagonal_of_all_that_was_collected() -> None:
    gradients, perturbations = rows("signed", 3)
    perturbations /= perturbations.norm(dim=1, keepdim=True)  # all rows of the diagonal's fit count the same
    first, deltas = torch.randn(8, SIZE), torch.randn(8, SIZE)
    loss = fisher_loss("fima-q", "signed", 3, alpha=0.3)
    for gradient, perturbation in zip(gradients, perturbations, strict=True):
        loss.collect(gradient, perturbation, first)
    G, P = gradients.double().numpy(), perturbations.double().numpy()
    fisher = G.T @ np.linalg.pinv(P.T)
    diagonal = np.maximum((G * P).sum(0) / (P * P).sum(0), 0)

    def terms(values: Tensor) -> tuple[float, float]:
        d = values.double().numpy()
        return np.mean(np.abs(np.sum((d @ fisher) * d, 1))), np.mean(d**2 @ diagonal)

    (low_rank, diagonals), (first_low_rank, first_diagonals) = terms(deltas), terms(first)
    expected = 0.3 * low_rank / first_low_rank + 0.7 * diagonals / first_diagonals
    assert loss(deltas, deltas).item() == pytest.approx(expected, rel=1e-3)
