"""Theorem 3.2 and Eq. (10): what the KL divergence says about the Fisher information matrix, in float64.

F is written out from its definition, J^T (diag(p) - p p^T) J with J the Jacobian of the logits, so nothing of
the code under test takes part in the reference.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from fimaq.fisher.divergence import kl_divergence, kl_gradient
from fimaq.models.prepare import prepare_model
from fimaq.models.units import UnitChain

SHRINKING = (1e-1, 3e-2, 1e-2, 3e-3, 1e-3)


@dataclass
class Point:
    """One sample at the output z of block 0: the logits behind it, F there, and a direction of unit size."""

    suffix: Callable[[list[Tensor]], Tensor]
    z: Tensor
    teacher: Tensor
    fisher: Tensor
    direction: Tensor
    temperature: float


@pytest.fixture(scope="module", params=[1.0, 4.0], ids=["T=1", "T=4"])
def point(request: pytest.FixtureRequest) -> Point:
    torch.set_num_threads(1)
    temperature = request.param
    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=8, patch_size=4, in_chans=1, num_classes=8, embed_dim=16, depth=2, num_heads=2
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    model = model.double().eval()
    images = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    chain = UnitChain(model, prepare_model(model, images, 4, 4), images)
    index = [unit.name for unit in chain.units].index("blocks.0")

    def suffix(outputs: list[Tensor]) -> Tensor:
        return chain.suffix(index, outputs, {})

    with torch.no_grad():
        z = chain.units[index](chain.next_inputs(0, chain.units[0](chain.first_inputs(images[:1])), {}))[0]
        teacher = suffix([z])
    scaled = teacher[0] / temperature
    p = torch.exp(scaled - scaled.logsumexp(0))
    jacobian = torch.func.jacrev(lambda v: suffix([v])[0] / temperature)(z).reshape(8, -1)
    fisher = jacobian.T @ (torch.diag(p) - torch.outer(p, p)) @ jacobian
    direction = torch.randn_like(z)
    return Point(suffix, z, teacher, fisher, direction / direction.norm(), temperature)


def orders(errors: list[float]) -> list[float]:
    """The exponents with which errors fall from one step size of SHRINKING to the next."""
    ratios = torch.tensor(errors).log().diff() / torch.tensor(SHRINKING).log().diff()
    return ratios.tolist()


def test_the_model_is_far_from_trivial(point: Point) -> None:
    dz = point.direction.flatten()
    assert dz @ point.fisher @ dz > 1e-6
    assert torch.linalg.matrix_rank(point.fisher) == 7


def test_the_divergence_is_the_quadratic_form_to_first_order_in_its_relative_error(point: Point) -> None:
    dz = point.direction.flatten()
    errors = []
    for t in SHRINKING:
        with torch.no_grad():
            student = point.suffix([point.z + t * point.direction])
            divergence = kl_divergence(point.teacher, student, point.temperature).item()
        quadratic = (t * dz @ point.fisher @ (t * dz) / 2).item()
        errors.append(abs(divergence / quadratic - 1))
    assert errors[-1] < 1e-2
    assert orders(errors) == pytest.approx([1] * 4, abs=0.2)


def test_the_gradient_of_the_divergence_is_the_fisher_matrix_times_the_perturbation(point: Point) -> None:
    errors = []
    for t in SHRINKING:
        perturbed = [point.z + t * point.direction]
        (gradient,) = kl_gradient(point.suffix, perturbed, point.teacher, point.temperature)
        expected = t * point.fisher @ point.direction.flatten()
        errors.append(((gradient.flatten() - expected).norm() / expected.norm()).item())
    assert errors[-1] < 1e-2
    assert orders(errors) == pytest.approx([1] * 4, abs=0.2)


def test_the_divergence_of_equal_outputs_and_its_gradient_are_zero(point: Point) -> None:
    (gradient,) = kl_gradient(point.suffix, [point.z], point.teacher, point.temperature)
    assert kl_divergence(point.teacher, point.teacher, point.temperature).item() == 0
    assert gradient.abs().max() < 1e-14


@pytest.mark.parametrize("classes", [2, 1000])
def test_a_small_divergence_of_single_precision_outputs_is_not_lost_in_rounding(classes: int) -> None:
    # As between a head and its 8-bit self: single precision leaves noise of it, or less than zero.
    generator = torch.Generator().manual_seed(0)
    teacher, error = (torch.randn(64, classes, generator=generator) for _ in range(2))
    student = teacher + 1e-3 * error
    step = (student.double() - teacher.double()) / 20
    p = (teacher.double() / 20).softmax(1)
    second_order = ((p * step.square()).sum(1) - (p * step).sum(1).square()) / 2
    found = kl_divergence(teacher, student, 20.0)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), second_order, rtol=1e-3, atol=1e-14)


def test_gradients_of_samples_in_one_batch_do_not_mix(point: Point) -> None:
    stretched = [point.z + s * point.direction for s in (0.1, -0.2, 0.3)]
    teachers = point.teacher.expand(3, -1)
    (together,) = kl_gradient(point.suffix, [torch.cat(stretched)], teachers, point.temperature)
    alone = [kl_gradient(point.suffix, [z], point.teacher, point.temperature)[0] for z in stretched]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-10, atol=1e-14)


def test_gradients_of_a_suffix_in_half_precision_are_not_lost() -> None:
    """Their size, 1e-9, is below the smallest number of float16: the same in double precision, to its digits."""
    torch.manual_seed(0)
    weights = [torch.randn(40, 30) / 6, torch.randn(30, 10) / 5]

    def suffix_in(dtype: torch.dtype) -> Callable[[list[Tensor]], Tensor]:
        return lambda outputs: torch.tanh(outputs[0].to(dtype) @ weights[0].to(dtype)) @ weights[1].to(dtype)

    z, direction = torch.randn(2, 5, 40, dtype=torch.float64)
    teacher = suffix_in(torch.float64)([z])
    perturbed = [z + 0.3 * direction]
    (expected,) = kl_gradient(suffix_in(torch.float64), perturbed, teacher, 3000.0)
    (found,) = kl_gradient(suffix_in(torch.float16), [perturbed[0].float()], teacher, 3000.0)
    assert 0 < expected.abs().max() < 6e-8
    assert (found - expected).norm() < 0.01 * expected.norm()
