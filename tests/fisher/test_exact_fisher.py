"""The complete Fisher matrix of one token, against its definition written out, in float64."""

from dataclasses import dataclass

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from fimaq.fisher.collect import Sample
from fimaq.fisher.divergence import kl_divergence
from fimaq.fisher.exact import Suffix, complete_fisher, relative_error, scale_to, token_columns
from fimaq.models.prepare import prepare_model
from fimaq.models.units import UnitChain

CHANNELS = 16
IMAGES = 3


@dataclass
class Place:
    """The output of block 0 for a few images, and the model behind it."""

    suffix: Suffix
    sample: Sample

    def token(self, number: int, temperature: float = 1.0) -> Tensor:
        return complete_fisher(self.suffix, [self.sample], number, temperature)


def place_behind(model: torch.nn.Module, images: Tensor, name: str) -> Place:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    model = model.double().eval()
    chain = UnitChain(model, prepare_model(model, images, 4, 4), images)
    index = [unit.name for unit in chain.units].index(name)
    with torch.no_grad():
        inputs = chain.first_inputs(images)
        for earlier in range(index):
            inputs = chain.next_inputs(earlier, chain.units[earlier](inputs), {})
        outputs = chain.units[index](inputs)
        teacher = model(images)
    return Place(lambda z, carried: chain.suffix(index, z, carried), Sample(0, inputs, outputs, teacher))


@pytest.fixture(scope="module", params=[8, 40], ids=["fewer classes than channels", "more classes than channels"])
def place(request: pytest.FixtureRequest) -> Place:
    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=8, patch_size=4, in_chans=1, num_classes=request.param, embed_dim=CHANNELS, depth=2, num_heads=2
    )
    return place_behind(model, torch.randn(IMAGES, 1, 8, 8, dtype=torch.float64), "blocks.0")


@pytest.mark.parametrize("temperature", [1.0, 20.0])
@pytest.mark.parametrize("token", [0, 3])
def test_it_is_the_definition(place: Place, token: int, temperature: float) -> None:
    expected = torch.zeros(CHANNELS, CHANNELS, dtype=torch.float64)
    for z, teacher in zip(place.sample.outputs[0], place.sample.teacher, strict=True):
        jacobian = torch.func.jacrev(lambda v: place.suffix([v[None]], {})[0] / temperature)(z)[:, token]
        p = torch.softmax(teacher / temperature, dim=0)
        expected += jacobian.T @ (torch.diag(p) - torch.outer(p, p)) @ jacobian / IMAGES
    assert expected.abs().max() > 1e-6
    torch.testing.assert_close(place.token(token, temperature), expected, rtol=1e-9, atol=1e-14)


def test_it_is_symmetric_and_positive_semidefinite(place: Place) -> None:
    fisher = place.token(0)
    values = torch.linalg.eigvalsh(fisher)
    assert torch.equal(fisher, fisher.T)
    assert values.min() > -1e-12 * values.max()


def test_its_quadratic_form_predicts_the_divergence_of_a_small_perturbation_of_the_token(place: Place) -> None:
    direction = torch.randn(CHANNELS, dtype=torch.float64)
    step = 1e-4 * direction / direction.norm()
    moved = place.sample.outputs[0].clone()
    moved[:, 2] += step
    with torch.no_grad():
        divergence = kl_divergence(place.sample.teacher, place.suffix([moved], {})).mean()
    torch.testing.assert_close(step @ place.token(2) @ step / 2, divergence, rtol=1e-2, atol=0)


def test_the_first_channels_give_the_upper_left_corner(place: Place) -> None:
    corner = complete_fisher(place.suffix, [place.sample], 0, channels=5)
    torch.testing.assert_close(corner, place.token(0)[:5, :5])


def test_a_batch_is_the_mean_of_its_images(place: Place) -> None:
    sample = place.sample
    alone = [Sample(i, [], [sample.outputs[0][i : i + 1]], sample.teacher[i : i + 1], {}) for i in range(IMAGES)]
    told: list[int] = []
    torch.testing.assert_close(complete_fisher(place.suffix, alone, 0, done=told.append), place.token(0))
    assert told == [1, 2, 3]


def test_no_images_are_refused(place: Place) -> None:
    with pytest.raises(ValueError, match="no images"):
        complete_fisher(place.suffix, [], 0)


def test_tokens_of_a_feature_map_are_counted_row_by_row() -> None:
    torch.manual_seed(0)
    model = timm.create_model(
        "swin_tiny_patch4_window7_224",
        img_size=16,
        window_size=2,
        embed_dim=8,
        depths=(1, 1),
        num_heads=(2, 2),
        num_classes=6,
    )
    place = place_behind(model, torch.randn(2, 3, 16, 16, dtype=torch.float64), "layers.0.blocks.0")
    outputs = place.sample.outputs[0]
    assert outputs.shape == (2, 4, 4, 8)
    assert torch.equal(outputs[0].flatten()[token_columns(outputs.shape[1:], 6)], outputs[0, 1, 2])
    direction = torch.randn(8, dtype=torch.float64)
    step = 1e-4 * direction / direction.norm()
    moved = outputs.clone()
    moved[:, 1, 2] += step
    with torch.no_grad():
        divergence = kl_divergence(place.sample.teacher, place.suffix([moved], {})).mean()
    torch.testing.assert_close(step @ place.token(6) @ step / 2, divergence, rtol=1e-2, atol=0)


def test_errors_do_not_depend_on_scale() -> None:
    complete = torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
    assert relative_error(complete, 7 * complete) == pytest.approx(0, abs=1e-12)
    assert relative_error(complete, -complete) == 1
    assert relative_error(complete, torch.zeros_like(complete)) == 1
    assert scale_to(complete, complete / 4) == pytest.approx(4)
