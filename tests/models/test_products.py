"""Attention written out as two products is scaled_dot_product_attention, whatever its arguments."""

import pytest
import torch
import torch.nn.functional as F

from fimaq.models import products
from fimaq.models.products import are_probabilities, written_out_attention
from fimaq.quant.layers import QuantMatMul
from fimaq.quant.masks import mask_key

GENERATOR = torch.Generator().manual_seed(0)


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


QUERY, KEY, VALUE = _normal(2, 6, 5, 8), _normal(2, 6, 7, 8), _normal(2, 6, 7, 4)
FILTER = torch.rand(5, 7, generator=GENERATOR) < 0.6
FILTER[:, 0] = True  # a row that attends to nothing has no defined output
CASES = {
    "plain": {},
    "float mask": {"attn_mask": _normal(2, 1, 5, 7)},
    "boolean mask": {"attn_mask": FILTER},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.77},
    "mask and scale": {"attn_mask": _normal(1, 6, 5, 7), "scale": 2.0},
}


@pytest.mark.parametrize("arguments", CASES.values(), ids=CASES)
def test_written_out_attention_is_the_fused_one(arguments):
    written = written_out_attention((torch.matmul, torch.matmul), QUERY, KEY, VALUE, **arguments)
    fused = F.scaled_dot_product_attention(QUERY, KEY, VALUE, **arguments)
    torch.testing.assert_close(written, fused, rtol=1e-12, atol=1e-12)


def test_written_out_attention_shares_keys_between_query_heads():
    key, value = KEY[:, :2], VALUE[:, :2]
    written = written_out_attention((torch.matmul, torch.matmul), QUERY, key, value, enable_gqa=True)
    fused = F.scaled_dot_product_attention(QUERY, key, value, enable_gqa=True)
    torch.testing.assert_close(written, fused, rtol=1e-12, atol=1e-12)


def test_the_scale_is_applied_before_the_first_product():
    lefts = []

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        lefts.append(left)
        return left @ right

    written_out_attention((product, product), QUERY, KEY, VALUE, scale=0.5)
    torch.testing.assert_close(lefts[0], QUERY * 0.5)


def test_the_second_product_sees_probabilities():
    lefts = []

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        lefts.append(left)
        return left @ right

    written_out_attention((product, product), QUERY, KEY, VALUE)
    assert len(lefts) == 2
    torch.testing.assert_close(lefts[1].sum(-1), torch.ones(2, 6, 5, dtype=torch.float64))


@pytest.mark.parametrize("arguments", CASES.values(), ids=CASES)
def test_spare_tokens_change_neither_what_is_learned_nor_its_gradients(arguments, monkeypatch):
    """On a GPU, rows of attention are filled up to whole vectors. QDrop's masks must stay the ones of a CPU."""
    monkeypatch.setattr(products, "_spare_tokens", lambda query, key: 0)
    plain = _learned(arguments)
    monkeypatch.setattr(products, "_spare_tokens", lambda query, key: 1)
    for without, with_spare in zip(plain, _learned(arguments), strict=True):
        torch.testing.assert_close(with_spare, without, rtol=1e-12, atol=1e-12)


def _learned(arguments):
    """Output of quantized attention with QDrop, and the gradients of its inputs and scales."""
    operands = [t.clone().requires_grad_() for t in (QUERY, KEY, VALUE)]
    pair = [QuantMatMul(3), QuantMatMul(3)]
    pair[1].rescales_rows = True
    scales = []
    for number, product in enumerate(pair):
        product.quantized = True
        for side, quantizer in enumerate((product.left_quantizer, product.right_quantizer)):
            scale = torch.full((), 0.2, dtype=torch.float64, requires_grad=True)
            quantizer.scale, quantizer.zero_point = scale, torch.full((), 2.0 + side, dtype=torch.float64)
            quantizer.dropping = (0.5, mask_key(torch.tensor(7, dtype=torch.int32), 2 * number + side), None)
            scales.append(scale)

    def first(left, right, spare=0):
        return pair[0](left, right, spare=spare)

    out = written_out_attention((first, pair[1]), *operands, **arguments)
    return [out, *torch.autograd.grad(out.square().sum(), [*operands, *scales])]


def test_the_output_of_a_softmax_is_recognised():
    assert are_probabilities(_normal(2, 6, 5, 7).softmax(-1))
    assert are_probabilities(_normal(2, 6, 5, 7).softmax(-1).float())


NOT_PROBABILITIES = {
    "scores": _normal(2, 6, 5, 7),
    "another dimension": _normal(2, 6, 5, 7).softmax(-2),
    "not normalised": _normal(2, 6, 5, 7).softmax(-1) * 1.1,
    "a negative value": _normal(2, 6, 5, 7).softmax(-1) + 0.5 * torch.tensor([1.0, -1, 0, 0, 0, 0, 0]),
    "heads mixed": torch.einsum("hg,bgnm->bhnm", _normal(6, 6), _normal(2, 6, 5, 7).softmax(-1)),
}


@pytest.mark.parametrize("values", NOT_PROBABILITIES.values(), ids=NOT_PROBABILITIES)
def test_what_is_no_output_of_a_softmax_is_recognised_too(values):
    assert not are_probabilities(values)
