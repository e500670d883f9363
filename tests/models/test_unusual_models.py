"""Models that users write themselves are quantized like any other."""

from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from own_models import (
    IMAGES,
    SETTINGS,
    SMALL,
    Attention,
    Model,
    assert_is_close,
    doubled_forward,
    quantize,
    timm_model,
)
from torch import Tensor, nn

import fimaq
from fimaq.errors import InputError
from fimaq.quant.layers import quantized_products


class Gated(nn.Module):
    """Multiplies activations itself, beside an attention within that does so too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention()
        self.narrow = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner(x)
        return x + (self.narrow(x) @ inner.mT).softmax(-1) @ inner


def test_an_attention_within_an_attention_has_products_of_its_own():
    model = Model(Gated())
    run = quantize(model)
    names = {name for name, _ in quantized_products(run.model)}
    assert names == {f"blocks.0.{inner}products.{number}" for inner in ("", "inner.") for number in (0, 1)}
    assert_is_close(run, model)


def test_a_compiled_model_is_quantized_as_what_it_was_compiled_from(tmp_path: Path):
    model, images = timm_model(), torch.randn(8, 3, 32, 32)
    settings = {**SETTINGS, "method": "rtn", "model_args": SMALL}
    plain, compiled = (
        fimaq.quantize(given, images, out=tmp_path / name, **settings)
        for name, given in (("plain", model), ("compiled", torch.compile(model)))
    )
    assert plain.config.model == compiled.config.model == "vit_tiny_patch16_224"
    with torch.no_grad():
        assert torch.equal(compiled.model(images), plain.model(images))


def test_a_block_whose_forward_the_user_replaced_keeps_it():
    class Block(nn.Sequential):
        pass

    model = Model(Block(Attention()))
    model.blocks[0].forward = MethodType(doubled_forward, model.blocks[0])
    run = quantize(model)
    assert_is_close(run, model)
    assert "forward" in vars(run.model.blocks[0])


class Renamed(Model):
    """Has its head under a second name, as models do that keep an old one."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = self.head


@torch.no_grad()
def assert_loads(path: Path, fresh: nn.Module, run: fimaq.Run) -> None:
    assert torch.equal(fimaq.load(path, model=fresh)(IMAGES), run.model(IMAGES))


def test_a_layer_with_two_names_is_stored_once(tmp_path: Path):
    run, plain = quantize(Renamed(), out=tmp_path / "run"), quantize(Model(), out=tmp_path / "plain")
    assert_loads(tmp_path / "run", Renamed(), run)
    assert run.metrics["size"] == plain.metrics["size"]


class Tied(Model):
    """Two blocks with the same weight, in layers of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(Attention())
        self.blocks[1].qkv.weight = self.blocks[0].qkv.weight


def test_a_weight_that_two_layers_share_becomes_one_of_each(tmp_path: Path):
    model = Tied()
    run = quantize(model, out=tmp_path / "run")
    assert_is_close(run, model)
    assert_loads(tmp_path / "run", Tied(), run)
    assert model.blocks[1].qkv.weight is model.blocks[0].qkv.weight


class SharedBias(Model):
    """Two norms that share their parameters; one is read by a residual as well."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LayerNorm(16)
        self.first.weight, self.first.bias = self.norm.weight, self.norm.bias
        self.mix = nn.Linear(16, 16)

    def forward(self, images: Tensor) -> Any:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = self.first(self.blocks[0](x))
        return self.head(self.norm(x + self.mix(x)).mean(1))


def test_norms_that_share_parameters_go_on_computing_what_they_did(tmp_path: Path):
    model = SharedBias()
    nn.init.normal_(model.norm.weight)
    nn.init.normal_(model.norm.bias)
    run = quantize(model, method="rtn", out=tmp_path / "run")
    assert_is_close(run, model)
    assert_loads(tmp_path / "run", SharedBias(), run)


class Choosing(Attention):
    """Attends to some tokens only."""

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        return x + self.proj(F.scaled_dot_product_attention(query, key, value, attn_mask=chosen[:, None]))


class Chosen(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Choosing() for _ in range(2))

    def forward(self, images: Tensor) -> Any:
        x = self.patches(images).flatten(2).transpose(1, 2)
        chosen = x[..., 0] >= x[..., 0].mean(1, keepdim=True)
        for block in self.blocks:
            x = block(x, chosen)
        return self.head(self.norm(x).mean(1))


def test_a_block_may_be_given_a_mask_of_each_image():
    model = Chosen()
    assert_is_close(quantize(model), model)


class Idle(Attention):
    """With a layer whose output nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        self.idle(x)
        return super().forward(x)


def test_a_layer_that_nothing_reads_learns_nothing():
    model = Model(Idle())
    run = quantize(model)
    assert_is_close(run, model)
    changes = run.metrics["units"][1]["scale_changes"]
    # Only its last digits move, in which scales divide as their reciprocals do.
    assert abs(changes["idle.input_quantizer"]) < 2e-4 < abs(changes["qkv.input_quantizer"])


class ReadsWeights(nn.Module):
    """Calls F.linear with the weight of its layer, and multiplies no activations."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp_of(self.attention(x))

    def mlp_of(self, x: Tensor) -> Tensor:
        return x + F.linear(x, self.mlp.weight, self.mlp.bias)


def test_a_layer_whose_weight_is_read_past_it_is_quantized_and_stored(tmp_path: Path):
    model = Model(ReadsWeights())
    run = quantize(model, method="fima-q", out=tmp_path / "run")
    called = []
    run.model.blocks[0].mlp.register_forward_hook(lambda *_: called.append(1))
    assert_is_close(run, model)
    assert called
    with torch.no_grad():
        assert torch.equal(fimaq.load(tmp_path / "run", model)(IMAGES), run.model(IMAGES))


def test_such_a_layer_may_have_a_massive_channel():
    settings = {"img_size": 32, "patch_size": 16, "depth": 1, "embed_dim": 64, "num_heads": 2, "num_classes": 7}
    model = timm.create_model("beit_base_patch16_224", **settings).eval()
    with torch.no_grad():
        model.blocks[0].norm1.bias[3] = 200.0
    images = torch.randn(8, 3, 32, 32)
    run = fimaq.quantize(model, images, **{**SETTINGS, "method": "rtn"})
    assert run.model.blocks[0].attn.qkv.divided
    with torch.no_grad():
        assert (run.model(images) - model(images)).norm() < 0.05 * model(images).norm()


class InPlace(Attention):
    """Changes what it was given."""

    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return super().forward(x)


class OutOfPlace(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 1)


class InPlaceAfterwards(Attention):
    """Changes what a layer of its has read, through which no gradient can then be taken."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(super().forward(x))
        x += 20 * self.wide(x)
        return x


class OutOfPlaceAfterwards(InPlaceAfterwards):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(Attention.forward(self, x))
        return x + 20 * self.wide(x)


class InPlaceBetween(Model):
    """Changes outputs of its patch embedding and of its blocks."""

    def forward(self, images: Tensor) -> Any:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x += 0.5
        x = F.relu(self.blocks[0](x), inplace=True)
        return self.head(self.norm(x).mean(1))


class OutOfPlaceBetween(Model):
    def forward(self, images: Tensor) -> Any:
        x = F.relu(self.blocks[0](self.patches(images).flatten(2).transpose(1, 2) + 0.5))
        return self.head(self.norm(x).mean(1))


@pytest.mark.parametrize(
    ("method", "in_place", "out_of_place"),
    [
        ("rtn", InPlace, OutOfPlace),
        ("fima-q", InPlace, OutOfPlace),
        ("rtn", InPlaceAfterwards, OutOfPlaceAfterwards),
    ],
)
def test_what_is_changed_in_place_is_quantized_as_what_is_not(
    method: str, in_place: type[nn.Module], out_of_place: type[nn.Module]
):
    one, two = InPlaceBetween(in_place()), OutOfPlaceBetween(out_of_place())
    two.load_state_dict(one.state_dict())
    runs = [quantize(model, method=method, bits="w8a4") for model in (one, two)]
    with torch.no_grad():
        assert torch.equal(runs[0].model(IMAGES), runs[1].model(IMAGES))


def test_what_gradients_need_must_not_be_changed_in_place():
    with pytest.raises(InputError, match=r"no gradients pass through blocks\.0 .*x \+= \.\.\."):
        quantize(Model(InPlaceAfterwards()), method="qdrop")


class WithoutProjections(nn.Module):
    def __init__(self, layer: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16) if layer else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + F.scaled_dot_product_attention(x, key=x, value=x))


@pytest.mark.parametrize("layer", [True, False])
@pytest.mark.parametrize("method", ["qdrop", "fima-q"])
def test_attention_without_projections_is_quantized(method: str, layer: bool):
    model = Model(WithoutProjections(layer))
    assert_is_close(quantize(model, method=method), model)


class NamedOperands(Attention):
    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        scores = torch.softmax(input=torch.matmul(query, other=key.mT) / 4, dim=-1)
        return x + self.proj(torch.bmm(input=scores, mat2=value))


def test_operands_may_be_given_by_name():
    model = Model(NamedOperands())
    run = quantize(model, method="fima-q")
    assert len(run.model.blocks[0].products) == 2
    assert_is_close(run, model)


def test_the_callers_autocast_is_left_out():
    model = Model()
    plain = quantize(model)
    with torch.autocast("cpu", torch.bfloat16):
        run = quantize(model)
    with torch.no_grad():
        assert torch.equal(run.model(IMAGES), plain.model(IMAGES))
