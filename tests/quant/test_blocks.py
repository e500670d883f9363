"""What a CPU does block by block, against the plain operators on the whole tensor: the same bits."""

import pytest
import torch
from torch import Tensor

from fimaq.quant import blocks, fake
from fimaq.quant.fake import fake_quantize, learned_fake_quantize

IMAGES, TOKENS, WIDTH, LEVELS = 7, 5, 6, 7
ZERO_POINT = torch.tensor(3.0)
EACH = (IMAGES, TOKENS, 1)
"""Scales as a step has them, for each row."""


def _as_keys(x: Tensor) -> Tensor:
    """The same values, lying in memory as their transpose."""
    return x.mT.contiguous().mT


def _of_queries(x: Tensor) -> Tensor:
    """The same values as every third row of something larger."""
    return torch.stack([x, x + 1, x + 2], dim=2)[:, :, 0]


def _filled_up_mask() -> Tensor:
    return (torch.rand(IMAGES, TOKENS, 8) < 0.5)[..., :WIDTH]


def _transposed_mask() -> Tensor:
    return (torch.rand(IMAGES, WIDTH, 8) < 0.5)[..., :TOKENS].mT


LYING = {"as they are": lambda x: x, "transposed": _as_keys, "with gaps": _of_queries}


@pytest.fixture(autouse=True)
def two_images_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK", 2 * TOKENS * WIDTH)


def _on_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "on_cpu", lambda x: False)


def _values() -> Tensor:
    x = torch.randn(IMAGES, TOKENS, WIDTH)
    x[0, 0, 0], x[1, 0, 0], x[2, 0, 0] = torch.nan, torch.inf, -torch.inf
    return x


@pytest.mark.parametrize("lying", LYING.values(), ids=LYING)
@pytest.mark.parametrize("mask", [None, _filled_up_mask, _transposed_mask])
@pytest.mark.parametrize("scale_shape", [EACH, (TOKENS, 1), ()])
def test_values_and_gradients_are_the_same_bits(lying, mask, scale_shape, monkeypatch):
    x, grad = lying(_values()), torch.randn(IMAGES, TOKENS, WIDTH)
    scale = 0.1 + torch.rand(scale_shape)
    dropped = None if mask is None else mask()

    def run() -> list[Tensor]:
        leaf, own = x.clone().copy_(x).requires_grad_(), scale.clone().requires_grad_()
        output = learned_fake_quantize(lying(leaf), own, ZERO_POINT, LEVELS, dropped)
        return [output, *torch.autograd.grad(output, (leaf, own), grad)]

    in_blocks = run()
    _on_the_whole(monkeypatch)
    for found, expected in zip(in_blocks, run(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [EACH, (IMAGES, 1, 1), (1, TOKENS, 1), (), (IMAGES, 1, 1, 1)])
def test_values_without_gradients_are_the_same_bits_for_any_shape_of_scales(shape, monkeypatch):
    """The last as a search has it: several candidates for one x."""
    x, scale, zero_point = _values(), 0.1 + torch.rand(shape), torch.randint(0, LEVELS, shape).float()
    in_blocks = fake_quantize(x, scale, zero_point, LEVELS)
    _on_the_whole(monkeypatch)
    torch.testing.assert_close(
        in_blocks, fake_quantize(x, scale, zero_point, LEVELS), rtol=0, atol=0, equal_nan=True
    )


def test_only_as_many_images_as_fit_are_worked_on_at_a_time(monkeypatch):
    seen = []
    divided = torch.div
    monkeypatch.setattr(torch, "div", lambda x, *rest, **named: seen.append(len(x)) or divided(x, *rest, **named))
    fake_quantize(_values(), torch.tensor(0.3), ZERO_POINT, LEVELS)
    assert seen == [2, 2, 2, 1]


def test_nothing_is_quantized_to_nothing():
    assert fake_quantize(torch.empty(0, 3), torch.tensor(0.3), ZERO_POINT, LEVELS).shape == (0, 3)


def test_a_trace_has_the_plain_operators():
    """A compiler fuses them by itself."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def run(x: Tensor) -> Tensor:
        return fake._forward(x, torch.tensor(0.3), ZERO_POINT, LEVELS, None)

    traced = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(torch.randn(IMAGES, TOKENS, WIDTH))
    assert torch.ops.aten.clamp.Tensor in {node.target for node in traced.graph.nodes}


def _fake_quantized_sum(x: Tensor) -> Tensor:
    return fake_quantize(x, torch.tensor(0.3), ZERO_POINT, LEVELS).sum((1, 2))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::torch.jit.TracerWarning")
def test_what_torch_traces_takes_any_number_of_images():
    """Blocks of the images that it was traced with would be all that it computes."""
    x = torch.randn(IMAGES, TOKENS, WIDTH)
    traced = torch.jit.trace(_fake_quantized_sum, (x[:1],))
    assert torch.equal(traced(x), _fake_quantized_sum(x))


@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore::FutureWarning")
def test_it_can_be_mapped_and_differentiated_forwards():
    x = torch.randn(IMAGES, TOKENS, WIDTH)
    mapped = torch.vmap(lambda image: _fake_quantized_sum(image[None])[0])(x)
    torch.testing.assert_close(mapped, _fake_quantized_sum(x))
    _, tangent = torch.func.jvp(_fake_quantized_sum, (x,), (torch.ones_like(x),))
    assert tangent.eq(0).all()  # rounding moves nothing


def test_a_scale_may_learn_without_a_step():
    scale = torch.tensor(0.3, requires_grad=True)
    fake_quantize(torch.full((2, 3), 0.31), scale, ZERO_POINT, LEVELS).sum().backward()
    assert scale.grad == 6
