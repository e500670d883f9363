"""Models that users write themselves and that are not supported are refused with the reason."""

import threading
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
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


def test_a_layer_whose_forward_the_user_replaced_does_not_stay_float_unnoticed():
    model = Model()
    model.head.forward = MethodType(doubled_forward, model.head)
    with pytest.raises(InputError, match=r"head \(Linear\)"):
        quantize(model)
    run = quantize(model, allow_float=True)
    assert run.metrics["stayed_float"] == ["head (Linear): addmm"]


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


class CountsImages(Attention):
    def forward(self, x: Tensor, images: int) -> Tensor:
        return super().forward(x.reshape(images, -1, 16))


class TellsTheNumber(Model):
    def forward(self, images: Tensor) -> Any:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = self.blocks[0](x, len(images))
        return self.head(self.norm(x).mean(1))


def test_a_block_that_is_told_the_number_of_images_is_refused():
    with pytest.raises(InputError, match=r"blocks\.0 \(CountsImages\) takes or gives the number 2 for two images"):
        quantize(TellsTheNumber(CountsImages()), method="rtn")


def test_a_layer_that_two_blocks_share_is_refused():
    model = Model()
    model.blocks.append(Attention())
    model.blocks[1].proj = model.blocks[0].proj
    with pytest.raises(InputError, match=r"blocks\.1\.proj is also a part of blocks\.0: layers that two blocks"):
        quantize(model, method="rtn")


class Hidden(Model):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = [Attention()]

    def forward(self, images: Tensor) -> Any:
        x = self.patches(images).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.hidden[0](self.blocks[0](x))).mean(1))


def test_a_block_in_a_plain_list_is_refused():
    with pytest.raises(InputError, match="Attention multiplies and is not among the model's modules"):
        quantize(Hidden())
