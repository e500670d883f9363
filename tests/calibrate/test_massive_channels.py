"""A massive channel is divided into columns: nothing changes in full precision, and its range becomes ordinary."""

import copy
from collections.abc import Iterator

import pytest
import timm
import torch
from torch import Tensor, nn

import fimaq
from fimaq.calibrate.massive import COLUMNS, _columns_for, divide_massive_channels
from fimaq.models.prepare import Structure, apply_structure, prepare_model
from fimaq.quant.layers import convert_layer

SIZE = 128


class Massive(nn.Module):
    """A Linear whose input has channels of given sizes: images (n, 3, 4, 4) -> (n, 10)."""

    def __init__(self, sizes: Tensor) -> None:
        super().__init__()
        self.spread, self.fc = nn.Linear(48, SIZE), nn.Linear(SIZE, 10)
        self.register_buffer("sizes", sizes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.spread(images.flatten(1))
        return self.fc(self.sizes * hidden / hidden.detach().abs().amax())


def prepared(*massive: tuple[int, float]) -> tuple[Massive, Tensor]:
    torch.manual_seed(0)
    sizes = torch.ones(SIZE)
    for channel, size in massive:
        sizes[channel] = size
    model = Massive(sizes).requires_grad_(False)
    images = torch.randn(64, 3, 4, 4)
    convert_layer(model.fc, 8, 8)
    return model, images


def test_a_massive_channel_gets_columns_and_the_output_stays() -> None:
    model, images = prepared((5, 20.0))
    before = model(images)
    divided = divide_massive_channels(model, lambda: iter(images.split(16)))
    assert {name: list(columns) for name, columns in divided.items()} == {"fc": [5]}
    assert model.fc.weight.shape == (10, SIZE + divided["fc"][5] - 1)
    assert (divided["fc"][5] - 1) % COLUMNS == 0
    torch.testing.assert_close(model(images), before)


def test_columns_are_no_larger_than_ordinary_channels() -> None:
    model, images = prepared((5, 10.0), (17, 15.0))
    hidden: list[Tensor] = []
    model.fc.register_forward_pre_hook(lambda module, args: hidden.append(args[0]))
    divide_massive_channels(model, lambda: iter([images]))
    ordinary = hidden[0].abs().amax(0)
    ordinary[[5, 17]] = 0
    assert hidden[0].abs().max() > 4 * ordinary.max()
    assert model.fc.columns(hidden[0]).abs().max() <= ordinary.max()


@pytest.mark.parametrize("sizes", [[], [(5, 1.5)], [(c, 100.0) for c in range(40)]], ids=["none", "mild", "many"])
def test_what_is_not_the_exception_stays(sizes: list[tuple[int, float]]) -> None:
    model, images = prepared(*sizes)
    assert divide_massive_channels(model, lambda: iter([images])) == {}
    assert model.fc.divided == {}


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_dead_or_broken_input_is_left_alone(value: float) -> None:
    model, images = prepared()
    model.sizes.fill_(value)
    assert divide_massive_channels(model, lambda: iter([images])) == {}


def vit_with_a_massive_channel() -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=48, num_heads=3
    )
    model.blocks[1].mlp.fc1.bias.data[7] = 60.0
    return model


@pytest.mark.parametrize("preset", ["deploy", "released"])
def test_a_run_divides_stores_and_loads_them(preset: str, tmp_path) -> None:
    images = torch.randn(16, 3, 32, 32)
    given = {"bits": "w4a4", "iters": 5, "batch_size": 8, "device": "cpu", "preset": preset}
    run = fimaq.quantize(vit_with_a_massive_channel(), images, out=tmp_path / "run", **given)
    layer = run.model.blocks[1].mlp.fc2
    assert layer.codes.shape[1] == layer.in_features > 192
    loaded = fimaq.load(tmp_path / "run", model=vit_with_a_massive_channel())
    assert torch.equal(loaded(images), run.model(images))


def test_dividing_lowers_the_error_of_a_quantized_model() -> None:
    images = torch.randn(32, 3, 32, 32)
    full = vit_with_a_massive_channel().eval()
    errors = {}
    for preset_massive in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not preset_massive:
                patch.setattr("fimaq.pipeline.divide_massive_channels", lambda model, images, ranks: {})
            given = {"bits": "w8a8", "method": "rtn", "batch_size": 8, "device": "cpu"}
            run = fimaq.quantize(copy.deepcopy(full), images, **given)
        with torch.no_grad():
            errors[preset_massive] = (run.model(images) - full(images)).square().mean().item()
    assert errors[True] < 0.5 * errors[False]


def test_a_structure_is_applied_to_a_fresh_model() -> None:
    images = torch.randn(4, 3, 32, 32)
    structure = prepare_model(vit_with_a_massive_channel(), images, 4, 4)
    structure.divided["blocks.1.mlp.fc2"] = {7: 17}
    fresh = vit_with_a_massive_channel().eval()
    before = fresh(images)
    again = Structure.from_dict(structure.as_dict() | {"divided": {"blocks.1.mlp.fc2": {"7": 17}}})
    apply_structure(fresh, again)
    layer = fresh.blocks[1].mlp.fc2
    assert layer.in_features == 192 + 16
    torch.testing.assert_close(fresh(images), before)


@pytest.mark.parametrize(("massive", "columns"), [(4.1, 17), (16.9, 17), (17.1, 33), (1000.0, 33)])
def test_a_channel_gets_as_many_columns_as_its_size_asks_for_up_to_a_quarter(massive: float, columns: int) -> None:
    sizes = torch.ones(SIZE)
    sizes[5] = massive
    assert _columns_for(sizes) == {5: columns}
    sizes[17] = massive  # a quarter of 128 columns for both
    assert _columns_for(sizes) == {5: 17, 17: 17}


def test_a_channel_that_is_massive_in_one_batch_alone_is_divided() -> None:
    model, images = prepared((5, 20.0))

    def batches() -> Iterator[Tensor]:
        yield images
        model.sizes[5] = 1
        yield images

    assert list(divide_massive_channels(model, batches)["fc"]) == [5]
