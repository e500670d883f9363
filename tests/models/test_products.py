"""Attention written out as two products is scaled_dot_product_attention, whatever its arguments."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fimaq.models import products
from fimaq.models.find_products import are_probabilities
from fimaq.models.products import open_module, written_out_attention
from fimaq.quant.layers import QuantMatMul

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
    monkeypatch.setattr(products, "spare_tokens", lambda key: 0)
    plain = _learned(arguments)
    monkeypatch.setattr(products, "spare_tokens", lambda key: 1)
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
            generator = torch.Generator().manual_seed(2 * number + side)
            quantizer.dropping = (torch.rand(1000, generator=generator) < 0.5, None)
            scales.append(scale)

    def first(left, right, spare=0):
        return pair[0](left, right, spare=spare)

    out = written_out_attention((first, pair[1]), *operands, **arguments)
    return [out, *torch.autograd.grad(out.square().sum(), [*operands, *scales])]


class Attention(nn.Module):
    """Softmax attention as timm's Swin has it: written out, or fused if it is told so."""

    fused_attn = False

    def forward(self, query, key, value, bias):
        if self.fused_attn:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        scores = (query / query.size(-1) ** 0.5) @ key.transpose(-2, -1) + bias
        return scores.softmax(-1) @ value


def opened(rescales_rows: bool) -> nn.Module:
    """With coarse ranges, its quantizers on."""
    module = Attention()
    open_module(module, 2, 3)
    for product in module.products:
        product.quantized = True
        product.left_quantizer.set_range(torch.tensor(0.3).double(), torch.tensor(2.0).double())
        product.right_quantizer.set_range(torch.tensor(0.4).double(), torch.tensor(3.0).double())
    module.products[1].left_quantizer.set_range(torch.tensor(1 / 7).double(), torch.tensor(0.0).double())
    module.products[1].rescales_rows = rescales_rows
    return module


@pytest.mark.parametrize("rescales_rows", [False, True])
def test_while_a_gpu_learns_attention_that_could_be_fused_is(rescales_rows, monkeypatch):
    module, bias = opened(rescales_rows), _normal(1, 6, 5, 7)
    results = []
    for on_gpu in (False, True):
        monkeypatch.setattr(products, "_learns_on_gpu", lambda args, on_gpu=on_gpu: on_gpu)
        monkeypatch.setattr(products, "spare_tokens", lambda key, on_gpu=on_gpu: int(on_gpu))
        operands = [t.clone().requires_grad_() for t in (QUERY, KEY, VALUE)]
        out = module(*operands, bias)
        results.append([out, *torch.autograd.grad(out.square().sum(), operands)])
        assert not module.fused_attn
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_rescaled_attention_learns_as_if_rows_of_a_softmax_were_divided_by_constants():
    """Divided by their largest elements, rounded straight through, multiplied: all else is autograd's own."""
    module, bias = opened(rescales_rows=True), _normal(1, 6, 5, 7)
    operands = [t.clone().requires_grad_() for t in (QUERY, KEY, VALUE)]
    query, key, value = operands
    first, second = module.products

    def rounded(quantizer, x):
        exact = torch.no_grad()(quantizer)(x)
        steps = x.detach() / quantizer.scale
        inside = (steps.round() >= -quantizer.zero_point) & (steps.round() <= 7 - quantizer.zero_point)
        return torch.where(inside, x, x.detach()) + (exact - x).detach()

    scores = rounded(first.left_quantizer, query / 8**0.5) @ rounded(first.right_quantizer, key).mT + bias
    weights = scores.softmax(-1)
    largest = weights.detach().amax(-1, keepdim=True)
    expected = rounded(second.left_quantizer, weights / largest) @ rounded(second.right_quantizer, value) * largest
    found = module(*operands, bias)
    torch.testing.assert_close(found, expected)
    sent = _normal(*found.shape)
    torch.testing.assert_close(*(torch.autograd.grad(out, operands, sent) for out in (found, expected)))


def test_no_gradient_of_quantized_attention_moves_all_scores_of_a_row():
    module, bias = opened(rescales_rows=True), _normal(2, 6, 5, 7).requires_grad_()
    out = module(QUERY.clone().requires_grad_(), KEY, VALUE, bias)
    (gradient,) = torch.autograd.grad(out, bias, _normal(*out.shape))
    assert gradient.abs().max() > 0.1
    assert gradient.sum(-1).abs().max() < 1e-12


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


class FromOne(nn.Module):
    """Attention whose queries, keys and values come from one Linear, as `changed` says."""

    def __init__(self, changed, dim=0):
        super().__init__()
        self.qkv, self.changed, self.dim = nn.Linear(12, 36), changed, dim

    def forward(self, x):
        parts = self.qkv(x).unflatten(-1, (3, 2, 6)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.transpose(0, self.dim).unbind(self.dim)
        return F.scaled_dot_product_attention(*self.changed(query, key, value), scale=0.3)


TAKEN = {
    "as they come": (lambda q, k, v: (q, k, v), True),
    "a query that is changed": (lambda q, k, v: (q * 2, k, v), False),
    "in another order": (lambda q, k, v: (k, q, v), False),
}


@pytest.mark.parametrize(("changed", "taken"), TAKEN.values(), ids=TAKEN)
def test_one_kernel_is_offered_the_parts_of_one_tensor_alone(changed, taken, monkeypatch):
    offered = []

    def at_once(scores, weighted, operands, bias, factor):
        offered.append((scores, weighted, operands.shape, bias, factor))
        return operands[2]

    monkeypatch.setattr(products, "attention_at_once", at_once)
    module, x = FromOne(changed), torch.randn(2, 5, 12, requires_grad=True)
    open_module(module, 2, 4)
    for product in module.products:
        product.quantized = True
        product.left_quantizer.leaves, product.right_quantizer.leaves = [], []
    found = module(x)
    assert found.shape == (2, 2, 5, 6)
    assert offered == ([(*module.products, (3, 2, 2, 5, 6), None, 0.3)] if taken else [])


def test_parts_of_another_dimension_are_not_taken_for_queries_keys_and_values(monkeypatch):
    """With three images the shapes alone do not tell."""
    monkeypatch.setattr(products, "attention_at_once", lambda *given: pytest.fail("taken"))
    module = FromOne(lambda q, k, v: (q, k, v), dim=1)
    open_module(module, 2, 4)
    module.watched = True
    assert module(torch.randn(3, 5, 12, requires_grad=True)).shape == (3, 2, 5, 6)
