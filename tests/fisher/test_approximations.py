"""Section 3.3: each approximation satisfies the equation it comes from, and its loss is its quadratic form."""

import pytest
import torch
from torch import Tensor

from fimaq.fisher.approximations import (
    aligned_piece,
    combined,
    diagonal_fisher,
    diagonal_loss,
    in_pieces,
    inverse_gram,
    inverse_root,
    low_rank_loss,
    rank_k_fisher,
    rank_one_fisher,
    rank_one_loss,
)

SIZE = 24


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def quadratic_forms(deltas: Tensor, matrix: Tensor) -> Tensor:
    """dz^T F dz for every row, one at a time."""
    return torch.stack([delta @ (matrix @ delta) for delta in deltas])


@pytest.mark.parametrize("rank", range(1, 7))
def test_rank_k_maps_every_collected_perturbation_onto_its_gradient(rank: int) -> None:
    gradients, perturbations = normal(rank, SIZE), normal(rank, SIZE)
    fisher = rank_k_fisher(gradients, perturbations)
    torch.testing.assert_close(perturbations @ fisher.T, gradients, rtol=1e-9, atol=1e-9)


def test_rank_k_has_rank_k() -> None:
    assert torch.linalg.matrix_rank(rank_k_fisher(normal(4, SIZE), normal(4, SIZE))) == 4


def test_rank_k_is_zero_across_what_was_collected() -> None:
    perturbations = normal(3, SIZE)
    across = torch.linalg.svd(perturbations).Vh[3:]
    assert (rank_k_fisher(normal(3, SIZE), perturbations) @ across.T).abs().max() < 1e-12


def test_rank_one_reproduces_a_matrix_of_rank_one() -> None:
    u = normal(SIZE)
    fisher = torch.outer(u, u)
    perturbation = normal(SIZE)
    found = rank_one_fisher(fisher @ perturbation, perturbation)
    torch.testing.assert_close(torch.outer(found, found), fisher, rtol=1e-9, atol=1e-12)


def test_rank_one_maps_the_perturbation_onto_its_gradient() -> None:
    gradient, perturbation = normal(SIZE), normal(SIZE)
    gradient = gradient * torch.sign(gradient @ perturbation)
    u = rank_one_fisher(gradient, perturbation)
    torch.testing.assert_close(u * (u @ perturbation), gradient, rtol=1e-9, atol=1e-12)


def test_rank_one_is_zero_where_no_semidefinite_matrix_fits() -> None:
    perturbation = normal(SIZE)
    assert rank_one_fisher(-perturbation, perturbation).eq(0).all()


@pytest.mark.parametrize("rows", [1, 3])
def test_the_diagonal_is_recovered_exactly(rows: int) -> None:
    diagonal, perturbations = normal(SIZE).abs(), normal(rows, SIZE)
    found = diagonal_fisher(perturbations * diagonal, perturbations)
    torch.testing.assert_close(found, diagonal, rtol=1e-10, atol=0.0)


def test_negative_entries_of_the_diagonal_are_set_to_zero() -> None:
    diagonal, perturbations = normal(SIZE), normal(1, SIZE)
    found = diagonal_fisher(perturbations * diagonal, perturbations)
    torch.testing.assert_close(found, diagonal.clamp_min(0), rtol=1e-10, atol=0.0)


def test_outputs_that_are_never_perturbed_get_a_zero_diagonal() -> None:
    perturbations = normal(2, SIZE)
    perturbations[:, 5] = 0
    found = diagonal_fisher(normal(2, SIZE), perturbations)
    assert found[5] == 0
    assert found.isfinite().all()


def test_the_diagonal_loss_is_its_quadratic_form() -> None:
    deltas, diagonal = normal(5, SIZE), normal(SIZE).abs()
    expected = quadratic_forms(deltas, torch.diag(diagonal))
    torch.testing.assert_close(diagonal_loss(deltas, diagonal), expected)


def test_the_rank_one_loss_is_its_quadratic_form() -> None:
    deltas, u = normal(5, SIZE), normal(SIZE)
    torch.testing.assert_close(rank_one_loss(deltas, u), quadratic_forms(deltas, torch.outer(u, u)))


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_the_low_rank_loss_is_the_quadratic_form_of_rank_k(rank: int) -> None:
    deltas, gradients, perturbations = normal(5, SIZE), normal(rank, SIZE), normal(rank, SIZE)
    pseudo_inverse = torch.linalg.solve(perturbations @ perturbations.T, perturbations)
    expected = quadratic_forms(deltas, gradients.T @ pseudo_inverse)
    loss = low_rank_loss(deltas, gradients, inverse_gram(perturbations) @ perturbations)
    torch.testing.assert_close(loss, expected, rtol=1e-8, atol=1e-10)


def test_the_root_of_the_inverse_gives_the_same_loss_on_both_sides() -> None:
    deltas, gradients, perturbations = normal(5, SIZE), normal(4, SIZE), normal(4, SIZE)
    expected = quadratic_forms(deltas, gradients.T @ torch.linalg.inv(perturbations @ perturbations.T) @ gradients)
    both = combined(inverse_root(perturbations), gradients)
    torch.testing.assert_close(low_rank_loss(deltas, both, both), expected, rtol=1e-8, atol=1e-10)


def as_tf32(x: Tensor) -> Tensor:
    """What a GPU's matrix units see of float32 numbers by default: ten bits behind the point."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def test_nearly_collinear_perturbations_need_no_more_precision_than_others() -> None:
    """Else reconstruction in tf32 follows rounding errors: successive perturbations are nearly collinear."""
    base = normal(1, 4096).abs()
    perturbations, gradients = ((base + 0.01 * normal(6, 4096).abs()).float() for _ in range(2))
    deltas = normal(8, 4096, dtype=torch.float32).abs()
    A, rows = deltas.double() @ gradients.double().T, perturbations.double()
    expected = (A @ torch.linalg.inv(rows @ rows.T) * A).sum(1)
    both = as_tf32(combined(inverse_root(perturbations), gradients))
    torch.testing.assert_close(low_rank_loss(as_tf32(deltas), both, both).double(), expected, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_dplr_is_the_quadratic_form_of_the_mixed_matrix(alpha: float) -> None:
    deltas, gradients, perturbations = normal(5, SIZE), normal(3, SIZE), normal(3, SIZE)
    diagonal = diagonal_fisher(gradients, perturbations)
    low_rank = low_rank_loss(deltas, gradients, inverse_gram(perturbations) @ perturbations)
    mixed = alpha * rank_k_fisher(gradients, perturbations) + (1 - alpha) * torch.diag(diagonal)
    loss = alpha * low_rank + (1 - alpha) * diagonal_loss(deltas, diagonal)
    torch.testing.assert_close(loss, quadratic_forms(deltas, mixed), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("factors", [(1.0, 1.0), (1.0, -2.0, 0.5), (1.0, 1 + 1e-9)])
def test_collinear_perturbations_still_map_onto_consistent_gradients(factors: tuple[float, ...]) -> None:
    scales = torch.tensor(factors, dtype=torch.float64)[:, None]
    perturbations, gradients = scales * normal(1, SIZE), scales * normal(1, SIZE)
    fisher = rank_k_fisher(gradients, perturbations)
    torch.testing.assert_close(perturbations @ fisher.T, gradients, rtol=1e-6, atol=1e-6)


def test_a_repeated_row_among_independent_ones_changes_nothing() -> None:
    perturbations, gradients = normal(3, SIZE), normal(3, SIZE)
    again = [0, 1, 2, 1]
    torch.testing.assert_close(
        rank_k_fisher(gradients[again], perturbations[again]),
        rank_k_fisher(gradients, perturbations),
        rtol=1e-9,
        atol=1e-10,
    )


def degenerate(kind: str) -> tuple[Tensor, Tensor]:
    gradients, perturbations = normal(3, SIZE, dtype=torch.float32), normal(3, SIZE, dtype=torch.float32)
    if kind == "collinear":
        perturbations = perturbations[:1].repeat(3, 1)
    elif kind == "zero perturbations":
        perturbations = torch.zeros_like(perturbations)
    elif kind == "one zero perturbation":
        perturbations[1] = 0
    elif kind == "zero gradients":
        gradients = torch.zeros_like(gradients)
    elif kind == "all zero":
        gradients, perturbations = torch.zeros_like(gradients), torch.zeros_like(perturbations)
    elif kind == "one row":
        gradients, perturbations = gradients[:1], perturbations[:1]
    elif kind == "both tiny":
        gradients, perturbations = 1e-20 * gradients, 1e-20 * perturbations
    elif kind == "both huge":
        gradients, perturbations = 1e20 * gradients, 1e20 * perturbations
    elif kind == "tiny gradients":
        gradients = 1e-20 * gradients
    elif kind == "huge perturbations":
        perturbations = 1e20 * perturbations
    return gradients, perturbations


KINDS = (
    "collinear",
    "zero perturbations",
    "one zero perturbation",
    "zero gradients",
    "all zero",
    "one row",
    "both tiny",
    "both huge",
    "tiny gradients",
    "huge perturbations",
)


@pytest.mark.parametrize("kind", KINDS)
def test_the_diagonal_is_finite_and_not_negative(kind: str) -> None:
    found = diagonal_fisher(*degenerate(kind))
    assert found.isfinite().all()
    assert (found >= 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_rank_one_direction_is_finite(kind: str) -> None:
    gradients, perturbations = degenerate(kind)
    assert all(rank_one_fisher(g, p).isfinite().all() for g, p in zip(gradients, perturbations, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_the_rank_k_matrix_is_finite(kind: str) -> None:
    assert rank_k_fisher(*degenerate(kind)).isfinite().all()


# Where perturbations are tiny, B is beyond float32: FisherLoss scales them first, and is tested for that.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "both tiny"])
def test_the_loss_of_one_sample_is_finite(kind: str) -> None:
    gradients, perturbations = degenerate(kind)
    delta = normal(1, SIZE, dtype=torch.float32)
    assert low_rank_loss(delta, gradients, combined(inverse_gram(perturbations), perturbations)).isfinite().all()


@pytest.mark.parametrize(("size", "piece"), [(37824, 192), (151296, 256), (1000, 200), (1001, 1001), (40, 40)])
def test_products_of_long_rows_are_sums_over_pieces_that_a_gpu_likes(size, piece):
    torch.manual_seed(0)
    assert aligned_piece(size) == piece
    few, others = torch.randn(3, size, dtype=torch.float64), torch.randn(2, size, dtype=torch.float64)
    torch.testing.assert_close(in_pieces(few, others, piece), few @ others.T)
