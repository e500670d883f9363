"""Folding equalises the channels of a LayerNorm and never changes what a model computes."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from timm.layers import LayerNorm2d
from torch import Tensor, nn

from fimaq.calibrate.fold import fold_layer_norms
from fimaq.models.prepare import prepare_model

SMALL = {"img_size": 64, "depth": 2, "embed_dim": 64, "num_heads": 4, "num_classes": 10}
SWIN = {"depths": (2, 2), "num_heads": (2, 4), "embed_dim": 32, "num_classes": 10}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("vit_tiny_patch16_224", SMALL),
    "siglip": ("vit_base_patch16_siglip_224", SMALL),
    "cait": ("cait_xxs24_224", SMALL),
    "beit": ("beit_base_patch16_224", SMALL),
    "swin": ("swin_tiny_patch4_window7_224", {**SWIN, "img_size": 112}),
    "swin_padded": ("swin_tiny_patch4_window7_224", {**SWIN, "img_size": 96}),
    "swinv2": ("swinv2_tiny_window8_256", {**SWIN, "img_size": 128}),
}

Folded = tuple[nn.Module, Tensor, Tensor, dict[str, str]]


@torch.no_grad()
def _fold(model: nn.Module, images: Tensor) -> Folded:
    """(folded model, images, output before, what was folded)."""
    prepare_model(model, images[:2], 4, 4)
    before = model(images)
    return model, images, before, fold_layer_norms(model, images[:2], lambda: _batches(images))


def _batches(images: Tensor) -> Iterator[Tensor]:
    yield from images.split(2)


@pytest.fixture
def folded(noisy_model: Callable[..., nn.Module]) -> Callable[[str], Folded]:
    """folded(key of MODELS) -> what `_fold` returns, in float64."""

    def fold(key: str) -> Folded:
        name, arguments = MODELS[key]
        size = arguments["img_size"]
        return _fold(noisy_model(name, **arguments).double(), torch.randn(4, 3, size, size, dtype=torch.float64))

    return fold


@pytest.mark.parametrize("key", MODELS)
def test_folding_changes_no_output(folded, key):
    model, images, before, names = folded(key)
    assert names, "nothing was folded, nothing was tested"
    with torch.no_grad():
        torch.testing.assert_close(model(images), before, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def _channel_extremes(model: nn.Module, name: str, images: Tensor) -> tuple[Tensor, Tensor]:
    outputs = []
    hook = model.get_submodule(name).register_forward_hook(lambda _, args, output: outputs.append(output))
    model(images)
    hook.remove()
    rows = torch.cat(outputs).flatten(0, -2)
    return rows.amin(0), rows.amax(0)


@pytest.mark.parametrize("key", ["vit", "swin_padded"])
def test_every_channel_of_a_folded_norm_has_the_same_range(folded, key):
    model, images, _, names = folded(key)
    for name in names:
        low, high = _channel_extremes(model, name, images)
        assert (high - low).max() / (high - low).min() < 1.001, name


def test_channels_of_a_fully_folded_norm_are_centred(folded):
    model, images, _, names = folded("vit")
    for name, kind in names.items():
        assert kind == "folded"
        low, high = _channel_extremes(model, name, images)
        torch.testing.assert_close(low, -high)


def test_every_norm_before_a_linear_layer_is_folded(folded):
    assert set(folded("vit")[3]) == {f"blocks.{i}.norm{j}" for i in (0, 1) for j in (1, 2)} | {"norm"}


def test_norms_that_feed_a_residual_are_left_alone(folded):
    """Swin-V2 normalises after attention and MLP, and adds the result to its input."""
    assert set(folded("swinv2")[3]) == {"norm"}


def test_no_shift_is_folded_where_windows_are_padded_with_zeros(folded):
    names = folded("swin_padded")[3]
    assert {kind for name, kind in names.items() if name.endswith("norm1")} == {"scaled"}
    assert {kind for name, kind in names.items() if name.endswith("norm2")} == {"folded"}


def test_a_shift_is_folded_where_windows_fit(folded):
    names = folded("swin")[3]
    assert {kind for name, kind in names.items() if name.endswith("norm1")} == {"folded"}


def test_a_norm_whose_reader_is_given_its_bias_is_scaled(folded):
    names = folded("beit")[3]
    assert {kind for name, kind in names.items() if name.endswith("norm1")} == {"scaled"}


class PostNorm(nn.Module):
    """Attention-free; `norm` is read by `fc1` and by the residual, as in a post-norm block."""

    def __init__(self, residual: float) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.norm = nn.LayerNorm(16)
        self.fc1 = nn.Linear(16, 32)
        self.fc2 = nn.Linear(32, 16)
        self.head = nn.Linear(16, 5)
        self.residual = residual

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.patches(images).flatten(2).transpose(1, 2))
        return self.head((self.residual * x + self.fc2(self.fc1(x).relu())).mean(1))


def _fold_post_norm(residual: float) -> tuple[Folded, dict[str, Tensor]]:
    model = PostNorm(residual).double()
    nn.init.normal_(model.norm.weight)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return _fold(model, torch.randn(4, 3, 16, 16, dtype=torch.float64)), state


def test_a_norm_that_a_residual_also_reads_is_left_alone():
    (model, _, _, names), state = _fold_post_norm(residual=1.0)
    assert names == {}
    for name, tensor in state.items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_the_same_norm_without_the_residual_is_folded():
    (_, _, _, names), _ = _fold_post_norm(residual=0.0)
    assert names == {"norm": "folded"}


def test_a_channel_that_is_always_the_same_breaks_nothing():
    model = PostNorm(residual=0.0).double()
    model.norm.weight.data[3] = 0.0
    model, images, before, names = _fold(model, torch.randn(4, 3, 16, 16, dtype=torch.float64))
    assert names == {"norm": "folded"}
    assert all(p.isfinite().all() for p in model.parameters())
    torch.testing.assert_close(model(images), before, rtol=1e-9, atol=1e-9)


def test_folding_leaves_nothing_to_be_trained(folded):
    assert not any(parameter.requires_grad for parameter in folded("vit")[0].parameters())


class ChannelsFirst(nn.Module):
    """A convolutional stem with timm's LayerNorm2d, which is an nn.LayerNorm over dimension 1."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.norm = LayerNorm2d(16)
        self.head = nn.Linear(16, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.patches(images)).mean((2, 3)))


def test_a_norm_over_channels_first_breaks_nothing():
    model, images, before, _ = _fold(ChannelsFirst().double(), torch.randn(4, 3, 32, 32, dtype=torch.float64))
    torch.testing.assert_close(model(images), before, rtol=1e-9, atol=1e-9)


class SeveralReaders(nn.Module):
    """Queries, keys and values by layers of their own, as many models outside of timm have them."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 16, 4, 4), nn.LayerNorm(16)
        self.readers = nn.ModuleList(nn.Linear(16, 5) for _ in range(3))

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.patches(images).flatten(2).transpose(1, 2))
        return sum(reader(x).relu() for reader in self.readers).mean(1)


def test_a_norm_that_several_layers_read_is_folded_into_all_of_them():
    model, images, before, names = _fold(SeveralReaders().double(), torch.randn(4, 3, 16, 16, dtype=torch.float64))
    assert names == {"norm": "folded"}
    torch.testing.assert_close(model(images), before, rtol=1e-9, atol=1e-9)
