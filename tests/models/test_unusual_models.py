"""Models that users write themselves: quantized like any other, or refused with the reason."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fimaq
from fimaq.errors import InputError
from fimaq.quant.layers import quantized_products

IMAGES = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
SETTINGS: dict[str, Any] = {"bits": "w8a8", "device": "cpu", "batch_size": 8, "iters": 3, "rank": 1}


SMALL: dict[str, Any] = {
    "img_size": 32, "patch_size": 16, "depth": 1, "embed_dim": 24, "num_heads": 2, "num_classes": 7
}  # fmt: skip


def timm_model() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", **SMALL).eval()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.proj = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Any:
        query, key, value = self.qkv(x).chunk(3, -1)
        return x + self.proj(F.scaled_dot_product_attention(query, key, value))


class Model(nn.Module):
    """Patches, one block, head."""

    def __init__(self, block: nn.Module | None = None, classes: int = 5) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.blocks = nn.ModuleList([block or Attention()])
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, classes)

    def forward(self, images: Tensor) -> Any:
        x = self.patches(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def quantize(model: nn.Module, **settings: Any) -> fimaq.Run:
    return fimaq.quantize(model.eval(), IMAGES, **{**SETTINGS, **settings})


@torch.no_grad()
def assert_is_close(run: fimaq.Run, model: nn.Module) -> None:
    """In 8 bits next to nothing is lost."""
    found, expected = run.model(IMAGES), model(IMAGES)
    assert (found - expected).norm() < 0.05 * expected.norm()


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


class Masked(Attention):
    """The first token may attend to nothing, which the fused attention makes zero."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        allowed = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        allowed[0] = False
        return x + self.proj(F.scaled_dot_product_attention(query, key, value, attn_mask=allowed))


def test_tokens_that_attend_to_nothing_are_refused():
    with pytest.raises(InputError, match="attend to nothing"):
        quantize(Model(Masked()))


class Positions(Attention):
    """Adds what a query says of a table of positions, the same for all images."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + (self.qkv(x)[..., :16] @ self.table).softmax(-1))


def test_a_product_with_a_table_is_refused_by_name():
    with pytest.raises(
        InputError, match=r"blocks\.0\.products\.0 multiplies something that is not there for each"
    ):
        quantize(Model(Positions()))


class Returning(Model):
    """Something else than logits."""

    def __init__(self, made_of_logits: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.made_of_logits = made_of_logits

    def forward(self, images: Tensor) -> Any:
        return self.made_of_logits(super().forward(images))


OUTPUTS = {
    "more": (lambda logits: (logits, logits > 0), "a tuple"),
    "one number": (lambda logits: logits.mean(), r"a tensor of shape \(\)"),
    "a number of each image": (lambda logits: logits[:, 0], r"a tensor of shape \(2,\)"),
    "images not first": (lambda logits: logits.T, r"a tensor of shape \(5, 2\)"),
}


@pytest.mark.parametrize(("made_of_logits", "named"), OUTPUTS.values(), ids=OUTPUTS)
def test_a_model_that_does_not_return_logits_is_refused(made_of_logits: Callable[[Tensor], Any], named: str):
    with pytest.raises(InputError, match=f"for 2 images the model returns {named}"):
        quantize(Returning(made_of_logits))


def test_a_model_without_layers_is_refused():
    with pytest.raises(InputError, match="no Linear or Conv2d layer"):
        quantize(nn.Sequential(nn.Flatten(), nn.LayerNorm(768)))


def test_a_single_output_has_no_class_probabilities_to_compare():
    with pytest.raises(InputError, match=r"'fima-q' .* use qdrop"):
        quantize(Model(classes=1))
    assert_is_close(quantize(model := Model(classes=1), method="qdrop"), model)


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


def doubled_forward(self: nn.Module, x: Tensor) -> Any:
    return 2 * type(self).forward(self, x)


def test_a_block_whose_forward_the_user_replaced_keeps_it():
    class Block(nn.Sequential):
        pass

    model = Model(Block(Attention()))
    model.blocks[0].forward = MethodType(doubled_forward, model.blocks[0])
    run = quantize(model)
    assert_is_close(run, model)
    assert "forward" in vars(run.model.blocks[0])


def test_a_layer_whose_forward_the_user_replaced_does_not_stay_float_unnoticed():
    model = Model()
    model.head.forward = MethodType(doubled_forward, model.head)
    with pytest.raises(InputError, match=r"head \(Linear\)"):
        quantize(model)
    run = quantize(model, allow_float=True)
    assert run.metrics["stayed_float"] == ["head (Linear): addmm"]


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


class Counting(Attention):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x.argmax(1)


class Indexed(Model):
    def __init__(self) -> None:
        super().__init__(Counting())

    def forward(self, images: Tensor) -> Any:
        x, index = self.blocks[0](self.patches(images).flatten(2).transpose(1, 2))
        return self.head(self.norm(x.gather(1, index[:, None])).mean(1))


def test_a_block_that_gives_integers_is_refused_by_name():
    with pytest.raises(InputError, match=r"blocks\.0 \(Counting\) gives integers"):
        quantize(Indexed())


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
    assert changes["idle.input_quantizer"] == 0 != changes["qkv.input_quantizer"]


class WithoutGradients(Model):
    @torch.no_grad()
    def forward(self, images: Tensor) -> Any:
        return super().forward(images)


def test_a_model_that_keeps_no_gradients_is_refused_where_they_are_taken():
    with pytest.raises(InputError, match=r"'fima-q' takes gradients .* use qdrop"):
        quantize(WithoutGradients())
    assert_is_close(quantize(model := WithoutGradients(), method="qdrop"), model)


class Detached(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


class InNoGrad(Attention):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize("block", [Detached, InNoGrad])
@pytest.mark.parametrize("method", ["qdrop", "fima-q"])
def test_a_block_that_keeps_no_gradients_is_refused_by_name(block: type[nn.Module], method: str):
    with pytest.raises(InputError, match=r"no gradients pass through blocks\.0 .* use rtn"):
        quantize(Model(block()), method=method)


def test_such_a_block_can_be_rounded():
    assert_is_close(quantize(model := Model(Detached()), method="rtn"), model)


class Random(Model):
    def forward(self, images: Tensor) -> Any:
        return F.dropout(super().forward(images), 0.5, training=True)


def test_a_model_that_draws_random_numbers_is_refused():
    with pytest.raises(InputError, match="something else each time"):
        quantize(Random())


class Inplace(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


def test_a_block_that_changes_what_it_is_given_is_refused_or_right():
    with pytest.raises(InputError, match="cannot be continued after patches"):
        quantize(Model(Inplace()))


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_another_type_are_refused_with_what_to_do(kind: torch.dtype):
    with pytest.raises(InputError, match=rf"weights of type {kind}.*model\.float\(\)"):
        quantize(Model().to(kind))


def test_a_weight_that_is_computed_from_others_does_not_stay_float_unnoticed():
    model = Model()
    nn.utils.parametrizations.weight_norm(model.head)
    with pytest.raises(InputError, match=r"head \(ParametrizedLinear\)"):
        quantize(model)


def test_a_model_that_cannot_be_copied_is_refused_with_a_way_out(tmp_path: Path):
    model = timm_model()
    model.lock = threading.Lock()
    images, out = torch.randn(8, 3, 32, 32), tmp_path / "run"
    settings = {**SETTINGS, "method": "rtn", "model_args": SMALL}
    with pytest.raises(InputError, match="inplace=True"):
        fimaq.quantize(model, images, out=out, **settings)
    assert not out.exists()
    run = fimaq.quantize(model, images, out=out, inplace=True, **settings)
    assert run.model is model
    assert run.config.model == "vit_tiny_patch16_224"


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_scripted_model_is_refused():
    with pytest.raises(InputError, match="TorchScript"):
        quantize(torch.jit.trace(Model().eval(), IMAGES))
