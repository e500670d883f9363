"""Collected averages against a plain loop: one image at a time, autograd through the whole model."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from fimaq.fisher.collect import Sample, collect_averages, flat, gradient_and_perturbation
from fimaq.models.prepare import prepare_model
from fimaq.models.units import UnitChain

TEMPERATURE = 3.0
BATCHES = ((0, 3), (3, 6), (6, 7))


@dataclass
class Scene:
    model: nn.Module  # as the user has it, never converted
    chain: UnitChain
    index: int
    images: Tensor


@pytest.fixture(scope="module")
def scene() -> Scene:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=8, patch_size=4, in_chans=1, num_classes=5, embed_dim=16, depth=2, num_heads=2
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    model = model.double().eval().requires_grad_(False)
    images = torch.randn(7, 1, 8, 8, dtype=torch.float64)
    converted = copy.deepcopy(model)
    chain = UnitChain(converted, prepare_model(converted, images[:2], 4, 4), images[:2])
    return Scene(model, chain, [unit.name for unit in chain.units].index("blocks.0"), images)


def coarse(z: Tensor) -> Tensor:
    """A stand-in for quantization: outputs on a grid of quarters."""
    return torch.round(4 * z) / 4


def samples(scene: Scene) -> Iterator[Sample]:
    unit = scene.chain.units[scene.index]
    for start, stop in BATCHES:
        images = scene.images[start:stop]
        with torch.no_grad():
            first = scene.chain.units[0](scene.chain.first_inputs(images))
            inputs = scene.chain.next_inputs(0, first, {})
            yield Sample(start, inputs, unit(inputs), scene.model(images))


def by_hand(scene: Scene) -> tuple[Tensor, Tensor]:
    """Every image's gradient and perturbation, (n, a) each, with the block's output exchanged by a hook."""
    gradients, perturbations = [], []
    for image in scene.images:
        seen = {}

        def exchange(_: nn.Module, __: object, z: Tensor, seen: dict = seen) -> Tensor:
            seen["perturbation"] = coarse(z.detach()) - z.detach()
            seen["leaf"] = coarse(z.detach()).requires_grad_()
            return seen["leaf"]

        teacher = scene.model(image[None])
        hook = scene.model.blocks[0].register_forward_hook(exchange)
        student = scene.model(image[None])
        hook.remove()
        loss = F.kl_div(
            F.log_softmax(student / TEMPERATURE, -1), F.softmax(teacher / TEMPERATURE, -1), reduction="sum"
        )
        loss.backward()
        gradients.append(seen["leaf"].grad.flatten())
        perturbations.append(seen["perturbation"].flatten())
    return torch.stack(gradients), torch.stack(perturbations)


def collect(
    scene: Scene, averages: str, keep: Any = None, given: Iterator[Sample] | None = None
) -> tuple[Tensor, Tensor]:
    unit = scene.chain.units[scene.index]

    def evaluate(sample: Sample) -> tuple[Tensor, Tensor]:
        return gradient_and_perturbation(
            lambda inputs: [coarse(z) for z in unit(inputs)],
            lambda outputs, carried: scene.chain.suffix(scene.index, outputs, carried),
            sample,
            TEMPERATURE,
        )

    return collect_averages(given or samples(scene), evaluate, averages, keep)


def test_signed_averages_are_the_means_of_a_loop_over_single_images(scene: Scene) -> None:
    gradients, perturbations = by_hand(scene)
    gradient, perturbation = collect(scene, "signed")
    torch.testing.assert_close(gradient, gradients.mean(0), rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(perturbation, perturbations.mean(0), rtol=1e-8, atol=1e-12)


def test_absolute_averages_are_the_means_of_absolute_values(scene: Scene) -> None:
    gradients, perturbations = by_hand(scene)
    gradient, perturbation = collect(scene, "absolute")
    torch.testing.assert_close(gradient, gradients.abs().mean(0), rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(perturbation, perturbations.abs().mean(0), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("averages", ["signed", "absolute"])
def test_every_gradient_is_handed_on_in_order_and_with_its_sign(scene: Scene, averages: str) -> None:
    kept: list[tuple[int, Tensor]] = []
    collect(scene, averages, lambda start, gradients: kept.append((start, gradients)))
    assert [start for start, _ in kept] == [start for start, _ in BATCHES]
    together = torch.cat([gradients for _, gradients in kept])
    torch.testing.assert_close(together, by_hand(scene)[0], rtol=1e-8, atol=1e-12)


def test_a_sample_whose_gradient_is_not_finite_counts_as_zero(scene: Scene) -> None:
    def spoiled() -> Iterator[Sample]:
        for sample in samples(scene):
            if sample.start == 3:
                sample.teacher = sample.teacher.clone()
                sample.teacher[1] = torch.nan
            yield sample

    gradient, _ = collect(scene, "signed", given=spoiled())
    gradients, _ = by_hand(scene)
    gradients[4] = 0
    torch.testing.assert_close(gradient, gradients.mean(0), rtol=1e-8, atol=1e-12)


def test_a_perturbation_that_is_not_finite_counts_as_zero(scene: Scene) -> None:
    def spoiled() -> Iterator[Sample]:
        for sample in samples(scene):
            if sample.start == 3:
                sample.outputs = [output.clone() for output in sample.outputs]
                sample.outputs[0][1] = torch.inf
            yield sample

    _, perturbation = collect(scene, "signed", given=spoiled())
    _, perturbations = by_hand(scene)
    perturbations[4] = 0
    torch.testing.assert_close(perturbation, perturbations.mean(0), rtol=1e-8, atol=1e-12)


def test_several_outputs_of_a_unit_become_one_vector_per_image() -> None:
    parts = [torch.arange(12.0).view(2, 2, 3), torch.arange(2.0).view(2, 1)]
    assert flat(parts).tolist() == [[0, 1, 2, 3, 4, 5, 0], [6, 7, 8, 9, 10, 11, 1]]
