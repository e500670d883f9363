"""Attention over small windows as one kernel, for steps that are compiled for a GPU.

The scores of 49 tokens are more numbers than the queries, keys and values that they are made of. Written as two
products with a softmax between, a step of Swin's first stage spends half of its time on storing and reading them.
Here one kernel quantizes, multiplies and keeps the scores in registers (`window_kernels.py`, Triton). What it
computes is what `models/products.py` writes out.
"""

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fimaq.quant.layers import QuantMatMul
from fimaq.quant.masks import ALIGNED
from fimaq.quant.quantizers import ActivationQuantizer

MOST_TOKENS, MOST_CHANNELS = 64, 64
"""Of one window and head, which a program holds in registers."""
HALF = -65504.0, 65504.0
"""The range of float16."""

_compiling_for_gpu = ContextVar("compiling_for_gpu", default=False)


@contextmanager
def compiling_for_gpu(on: bool) -> Iterator[None]:
    """What is traced meanwhile may be done by kernels that only a GPU has."""
    before = _compiling_for_gpu.set(on)
    try:
        yield
    finally:
        _compiling_for_gpu.reset(before)


@torch.library.custom_op("fimaq::window_attention", mutates_args=())
def window_attention(
    operands: Sequence[Tensor],
    bias: Tensor | None,
    ranges: Sequence[Tensor],
    masks: Sequence[Tensor],
    factor: float,
    normalised: bool,
) -> Tensor:
    """Q(softmax(Q(factor * query) Q(key)^T + bias)) Q(value) for query, key, value (windows, heads, tokens, width).

    Q is fake quantization where the bytes of `masks`, rows filled up to multiples of 8, are 0. `ranges` are scales and
    zero points (4, heads, tokens) and the numbers of levels (4,), of queries, keys, weights, values. `bias`, contiguous
    and its rows filled up likewise, broadcasts against the scores. If not `normalised`, the exponentials are quantized, of which the largest of a row is 1, and
    the product is divided by their sums, which do not learn. The result lies in memory by tokens, then heads.
    """
    from fimaq.quant import window_kernels

    out = _by_tokens(operands[0])
    window_kernels.forward(operands, bias, ranges, masks, factor, normalised, out)
    return out.transpose(1, 2)


@window_attention.register_fake
def _(operands: Sequence[Tensor], *others: Any) -> Tensor:
    return _by_tokens(operands[0]).transpose(1, 2)


@torch.library.custom_op("fimaq::window_attention_backward", mutates_args=())
def window_attention_backward(
    sent: Tensor,
    operands: Sequence[Tensor],
    bias: Tensor | None,
    ranges: Sequence[Tensor],
    masks: Sequence[Tensor],
    factor: float,
    normalised: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of query, key and value (3, windows, heads, tokens, width), by tokens in memory; of all scales for each
    row (4, windows, heads, tokens)."""
    from fimaq.quant import window_kernels

    found = _empty_gradients(operands[0])
    window_kernels.backward(operands, bias, ranges, masks, factor, normalised, sent, found)
    return found[0].permute(2, 0, 3, 1, 4), found[1]


@window_attention_backward.register_fake
def _(sent: Tensor, operands: Sequence[Tensor], *others: Any) -> tuple[Tensor, Tensor]:
    found = _empty_gradients(operands[0])
    return found[0].permute(2, 0, 3, 1, 4), found[1]


def _by_tokens(x: Tensor) -> Tensor:
    """An empty tensor (windows, tokens, heads, width) for x (windows, heads, tokens, width)."""
    windows, heads, tokens, width = x.shape
    return x.new_empty(windows, tokens, heads, width)


def _empty_gradients(x: Tensor) -> tuple[Tensor, Tensor]:
    windows, heads, tokens, width = x.shape
    of_scales = x.new_empty(4, windows, heads, tokens, dtype=torch.float32)
    return x.new_empty(windows, tokens, 3, heads, width), of_scales


class _WindowAttention(torch.autograd.Function):
    """Of query, key and value in one tensor, scales of queries, keys, weights and values by rows, and what is fixed."""

    @staticmethod
    def forward(ctx: Any, operands: Tensor, *others: Any) -> Tensor:
        ctx.save_for_backward(operands)
        ctx.fixed = others[4:]
        return window_attention(operands.unbind(), *ctx.fixed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_operands, of_scales = window_attention_backward(grads[0], ctx.saved_tensors[0].unbind(), *ctx.fixed)
        of_query, of_key, of_weights, of_value = of_scales[..., None].unbind()
        return (of_operands, of_query, of_key.mT, of_weights, of_value, *(None for _ in ctx.fixed))


def attention_at_once(
    products: tuple[QuantMatMul, QuantMatMul], operands: Tensor, bias: Tensor | None, factor: float
) -> Tensor | None:
    """A softmax of `factor` * query key^T + bias between two quantized products; None where there is no kernel.

    `operands`: query, key and value, (3, windows, heads, tokens, width).
    """
    quantizers = [
        products[0].left_quantizer,
        products[0].right_quantizer,
        products[1].left_quantizer,
        products[1].right_quantizer,
    ]
    if not (_can_be_compiled(operands, bias) and _suit(products, quantizers)):
        return None
    query, key, value = operands.unbind()
    weights = query[..., :1].expand(*query.shape[:3], key.size(-2))
    scales = [q.learned_scale(x) for q, x in zip(quantizers, (query, key.mT, weights, value), strict=True)]
    ranges = [
        torch.stack([_by_row(q.scale.detach(), query, q is quantizers[1]) for q in quantizers]),
        torch.stack([_by_row(q.zero_point, query, q is quantizers[1]) for q in quantizers]),
        torch.stack([q.highest for q in quantizers]),
    ]
    masks = [q.dropping[0] for q in quantizers if q.dropping is not None]
    if bias is not None:
        # In half precision, for each window may have its own. Operands have three binary digits less.
        tokens = key.size(-2)
        bias = F.pad(bias.expand(*bias.shape[:-2], tokens, tokens).clamp(*HALF).half(), (0, -tokens % ALIGNED))
    normalised = not products[1].wants_exponentials(True)
    return _WindowAttention.apply(operands, *scales, bias, ranges, masks, factor, normalised)  # type: ignore[no-any-return]


def _by_row(numbers: Tensor, query: Tensor, transposed: bool) -> Tensor:
    """What broadcasts against an operand, or against the transpose of one, for each row: (heads, tokens)."""
    _, heads, tokens, _ = query.shape
    shape = (1, heads, 1, tokens) if transposed else (1, heads, tokens, 1)
    return numbers.expand(shape).reshape(heads, tokens)


def _can_be_compiled(operands: Tensor, bias: Tensor | None) -> bool:
    if not (_compiling_for_gpu.get() and operands.is_cuda and _has_triton()):
        return False
    small = operands.dim() == 5 and operands.size(-2) <= MOST_TOKENS and operands.size(-1) <= MOST_CHANNELS
    learns = operands.requires_grad and (bias is None or (bias.is_floating_point() and not bias.requires_grad))
    return operands.dtype == torch.bfloat16 and operands.stride(-1) == 1 and small and learns


def _suit(products: tuple[QuantMatMul, QuantMatMul], quantizers: Sequence[ActivationQuantizer]) -> bool:
    """Whether each learns one scale for a row at most, and all drop or none, in whole batches."""
    columns = [q.scale.shape[-2:-1] if q is quantizers[1] else q.scale.shape[-1:] for q in quantizers]
    of_rows = all(q.leaves is not None and q.scale.dim() <= 3 for q in quantizers) and set(columns) <= {(), (1,)}
    dropping = [q.dropping for q in quantizers]
    whole = all(drops is None for drops in dropping) or all(drops and drops[1] is None for drops in dropping)
    return all(p.quantized for p in products) and of_rows and whole


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
