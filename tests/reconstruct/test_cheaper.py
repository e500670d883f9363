"""Operators that are replaced in what a GPU compiles, against float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from demo_walk import configured, walk
from torch.fx.experimental.proxy_tensor import make_fx

from fimaq.quant.fake import learned_fake_quantize
from fimaq.reconstruct import compiled
from fimaq.reconstruct.cheaper import CHEAPER, exp, gelu, gelu_backward, normal_cdf, pieces_of

DOUBLE = torch.float64
WIDE = torch.cat([torch.linspace(-9, 9, 200_001), torch.tensor([0.0, -0.0, 1e-30, 40.0, -40.0, 3e4, -3e4])])


def test_a_normal_distribution_is_right_to_two_millionths():
    exact = torch.special.ndtr(WIDE.double())
    assert (normal_cdf(WIDE) - exact).abs().max() < 2e-6
    assert normal_cdf(torch.tensor([math.inf, -math.inf])).tolist() == [1, 0]


def test_gelu_and_its_gradient_are_right_to_two_millionths():
    exact = WIDE.double().requires_grad_()
    F.gelu(exact).sum().backward()
    size = WIDE.abs().clamp_min(1)
    assert ((gelu(WIDE) - F.gelu(exact)) / size).abs().max() < 2e-6
    assert (gelu_backward(torch.ones_like(WIDE), WIDE) - exact.grad).abs().max() < 3e-6


def test_types_are_kept_and_digits_not_lost_on_the_way():
    x = torch.randn(100, dtype=torch.bfloat16)
    assert gelu_backward(x, x).dtype == torch.bfloat16
    torch.testing.assert_close(gelu(x), F.gelu(x))
    torch.testing.assert_close(exp(x), x.exp())


def test_powers_are_right_to_their_last_digits():
    x = torch.linspace(-80, 80, 10_001)
    torch.testing.assert_close(exp(x).double(), x.double().exp(), rtol=2e-5, atol=0)
    assert exp(torch.tensor(-math.inf)) == 0


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 6e-3), (DOUBLE, 1e-14)])
@pytest.mark.parametrize(("rows", "inner", "columns"), [(24, 32 * 197, 48), (10, 7 * 300, 70)])
def test_a_long_product_in_pieces_is_the_product(rows, inner, columns, dtype, error):
    left, right = torch.randn(inner, rows, dtype=dtype).T, torch.randn(inner, columns, dtype=dtype)
    traced = make_fx(torch.mm, CHEAPER)(left, right)
    assert torch.ops.aten.bmm.default in {node.target for node in traced.graph.nodes}
    exact = left.double() @ right.double()
    found = traced(left, right)
    assert found.dtype == dtype
    assert (found - exact).norm() / exact.norm() < error


def test_products_are_cut_only_where_a_gpu_would_not_be_busy():
    tokens = 32 * 197
    assert pieces_of(tokens, 576, 192) == 8
    assert pieces_of(tokens, 2304, 768) == 1  # enough tiles as it is
    assert pieces_of(192, tokens, 576) == 1
    assert pieces_of(192, 32, 16) == 1  # too short
    assert pieces_of(9973, 48, 48) == 1  # a prime number of terms


def _quantized_mlp(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    scale = torch.tensor(0.25).requires_grad_()
    quantized = learned_fake_quantize(F.gelu(x), scale, torch.tensor(1.0), torch.tensor(15.0))
    return torch.cat([part.flatten() for part in torch.autograd.grad(quantized.exp().sum(), [x, scale])])


def test_replaced_operators_compute_what_a_function_and_its_gradients_did():
    x = torch.randn(64)
    traced = make_fx(_quantized_mlp, CHEAPER)(x)
    left = {str(node.target) for node in traced.graph.nodes} & {str(operator) for operator in CHEAPER}
    assert not left
    torch.testing.assert_close(traced(x), _quantized_mlp(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("function", "dtype"),
    [(lambda x: F.gelu(x, approximate="tanh"), torch.float32), (F.gelu, DOUBLE), (torch.exp, DOUBLE)],
    ids=["tanh", "gelu in double precision", "exp in double precision"],
)
def test_what_has_no_cheaper_form_is_traced_as_it_is(function, dtype):
    x = torch.randn(16, dtype=dtype)
    traced = make_fx(function, CHEAPER)(x)
    assert {node.target for node in traced.graph.nodes} & set(CHEAPER)
    assert torch.equal(traced(x), function(x))


def _losses(compile: bool) -> list[float]:
    """The first losses of patch embedding and first block of the demo model."""
    reconstruction, found = walk(configured(method="fima-q", iters=20, compile=compile)), []
    for index in (0, 1):
        found += reconstruction.reconstruct(index, lambda iteration, loss: None).losses[:6]
        reconstruction.advance(index)
    return [loss for _, loss in found]


def test_a_step_of_replaced_operators_learns_what_a_plain_one_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as for a GPU, and then run operator by operator."""
    plain, replaced = _losses(compile=False), []

    def as_it_is(traced: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        replaced.extend(node for node in traced.graph.nodes if node.target is torch.ops.aten.exp2.default)
        return traced

    monkeypatch.setattr(compiled, "_on_gpu", lambda tensors: tensors.keys() >= {"loss"})
    monkeypatch.setattr(compiled, "_compile", as_it_is)
    monkeypatch.setattr(compiled.Replay, "_record", lambda self: None)
    assert _losses(compile=True) == pytest.approx(plain, rel=1e-4)
    assert replaced
