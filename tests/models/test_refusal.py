"""What cannot be quantized completely is refused by name, or listed as float when that is allowed."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fimaq.errors import InputError
from fimaq.models.prepare import prepare_model
from fimaq.models.products import watched
from fimaq.models.units import UnitChain
from fimaq.quant.layers import QuantizedLayer

IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    """One head. `scores` and `average` are the two products."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.proj = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        return x + self.proj(self.average(self.scores(query, key).softmax(-1), value))

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.transpose(1, 2) / 4

    def average(self, weights: Tensor, value: Tensor) -> Tensor:
        return weights @ value


class EinsumAttention(Attention):
    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        return torch.einsum("bnc,bmc->bnm", query, key) / 4

    def average(self, weights: Tensor, value: Tensor) -> Tensor:
        return torch.einsum("bnm,bmc->bnc", weights, value)


class HalfEinsumAttention(EinsumAttention):
    average = Attention.average


class TorchAttention(nn.Module):
    """torch's own module, which runs as a single operator in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x, x, x, need_weights=False)[0]


class Model(nn.Module):
    """Patches, blocks, head; `order` says which block is called when."""

    def __init__(self, attention: Callable[[], nn.Module], order: tuple[int, ...] = (0, 1)) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.blocks = nn.ModuleList(attention() for _ in range(2))
        self.head = nn.Linear(16, 5)
        self.order = order

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        for index in self.order:
            x = self.blocks[index](x)
        return self.head(x.mean(1))


def test_matmul_attention_is_accepted():
    structure = prepare_model(Model(Attention).eval(), IMAGES, 4, 4)
    assert structure.products == {"blocks.0": (2, 4), "blocks.1": (2, 4)}
    assert structure.stayed_float == []


def test_einsum_attention_is_refused_with_module_and_class():
    with pytest.raises(InputError, match=r"blocks\.0 \(EinsumAttention\).*blocks\.1 \(EinsumAttention\)"):
        prepare_model(Model(EinsumAttention).eval(), IMAGES, 4, 4)


def test_the_refusal_says_how_to_go_on():
    with pytest.raises(InputError, match="--allow-float"):
        prepare_model(Model(EinsumAttention).eval(), IMAGES, 4, 4)


def test_allow_float_quantizes_the_rest():
    model = Model(EinsumAttention).eval()
    structure = prepare_model(model, IMAGES, 4, 4, allow_float=True)
    expected = ["patches", "blocks.0.qkv", "blocks.0.proj", "blocks.1.qkv", "blocks.1.proj", "head"]
    assert list(structure.layers) == expected
    assert all(isinstance(model.get_submodule(name), QuantizedLayer) for name in expected)


def test_allow_float_lists_what_stays_float():
    structure = prepare_model(Model(EinsumAttention).eval(), IMAGES, 4, 4, allow_float=True)
    assert structure.stayed_float == ["blocks.0 (EinsumAttention): bmm", "blocks.1 (EinsumAttention): bmm"]


def test_a_half_opened_attention_is_refused_under_its_own_class():
    with pytest.raises(InputError, match=r"blocks\.0 \(HalfEinsumAttention\)"):
        prepare_model(Model(HalfEinsumAttention).eval(), IMAGES, 4, 4)


def test_torch_multihead_attention_does_not_stay_float_unnoticed():
    with pytest.raises(InputError, match=r"blocks\.0\.inner \(MultiheadAttention\)"):
        prepare_model(Model(TorchAttention).eval(), IMAGES, 4, 4)


@torch.no_grad()
def test_allow_float_calls_no_layer_quantized_that_never_runs():
    model = Model(TorchAttention).eval()
    structure = prepare_model(model, IMAGES, 4, 4, allow_float=True)
    called: set[str] = set()
    for name in structure.layers:
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: called.add(name))
    with watched(model):
        model(IMAGES)
    assert set(structure.layers) == called


def test_a_convolution_with_other_padding_is_refused():
    model = Model(Attention).eval()
    model.patches = nn.Conv2d(3, 16, 4, 4, padding=2, padding_mode="reflect")
    with pytest.raises(InputError, match=r"patches \(Conv2d\)"):
        prepare_model(model, IMAGES, 4, 4)


class SharedMixer(Model):
    """The same Linear after every block."""

    def __init__(self) -> None:
        super().__init__(Attention)
        self.mixer = nn.Linear(16, 16)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = self.mixer(block(x))
        return self.head(x.mean(1))


def test_a_unit_used_twice_is_refused():
    model = SharedMixer().eval()
    structure = prepare_model(model, IMAGES, 4, 4)
    with pytest.raises(InputError, match="mixer is used more than once"):
        UnitChain(model, structure, IMAGES)


def test_a_block_used_twice_is_refused():
    model = Model(Attention, order=(0, 1, 0)).eval()
    with pytest.raises(InputError, match=r"blocks\.0 is used more than once"):
        UnitChain(model, prepare_model(model, IMAGES, 4, 4), IMAGES)


def test_a_block_that_is_never_called_is_left_alone():
    model = Model(Attention, order=(1,)).eval()
    structure = prepare_model(model, IMAGES, 4, 4)
    assert [unit.name for unit in UnitChain(model, structure, IMAGES).units] == ["patches", "blocks.1", "head"]


def test_a_head_that_is_not_called_as_a_whole_is_refused():
    class IteratedHead(Model):
        def __init__(self) -> None:
            super().__init__(Attention)
            self.head = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 5))

        def forward(self, images: Tensor) -> Tensor:
            x = self.blocks[1](self.blocks[0](self.patches(images).flatten(2).transpose(1, 2))).mean(1)
            for layer in self.head:
                x = layer(x)
            return x

    model = IteratedHead().eval()
    structure = prepare_model(model, IMAGES, 4, 4)
    with pytest.raises(InputError, match="head"):
        UnitChain(model, structure, IMAGES)
