"""Attention over small windows as one kernel, for steps that are compiled for a GPU.

The scores of 49 tokens are more numbers than the queries, keys and values that they are made of. Written as two
products with a softmax between, they are stored and read about ten times. One kernel quantizes, multiplies and
keeps them in registers (`window_kernels.py`, in Triton). It computes what `models/products.py` writes out.
"""

import importlib.util
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph

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


def attention_at_once(
    scores: QuantMatMul, weighted: QuantMatMul, operands: Tensor, bias: Tensor | None, factor: float
) -> Tensor | None:
    """What two quantized products with a softmax between give; None where there is no kernel for it.

    `operands`: query, key and value, (3, windows, heads, tokens, width). The softmax is that of `factor` * query
    key^T + bias.
    """
    quantizers = [scores.left_quantizer, scores.right_quantizer, weighted.right_quantizer, weighted.left_quantizer]
    if not (_has_kernel(operands, bias) and scores.quantized and weighted.quantized and _by_rows(quantizers)):
        return None
    query, key, value = operands.unbind()
    tokens = query.size(-2)
    of_softmax = query[..., :1].expand(*query.shape[:-1], tokens)
    quantized = (query, key.mT, value, of_softmax)
    scales = [q.learned_scale(x) for q, x in zip(quantizers, quantized, strict=True)]
    ranges = [
        torch.stack([_of_rows(q.scale.detach(), x) for q, x in zip(quantizers, quantized, strict=True)]),
        torch.stack([_of_rows(q.zero_point, x) for q, x in zip(quantizers, quantized, strict=True)]),
        torch.stack([q.highest for q in quantizers]),
    ]
    drops = [q.dropping[0] for q in quantizers if q.dropping is not None]
    if bias is not None:
        # In half precision, for each window may have its own. Operands have three binary digits less.
        bias = bias.expand(*bias.shape[:-2], tokens, tokens).clamp(*HALF).half()
        bias = F.pad(bias, (0, -tokens % ALIGNED)).contiguous()
    normalised = not weighted.wants_exponentials(learns=True)
    return _WindowAttention.apply(operands, *scales, bias, ranges, drops, factor, normalised)  # type: ignore[no-any-return]


def _of_rows(numbers: Tensor, x: Tensor) -> Tensor:
    """What broadcasts against an operand (windows, heads, tokens, width), or one transposed: (heads, tokens)."""
    transposed = x.stride(-2) < x.stride(-1)
    heads, tokens = x.size(1), x.size(-1 if transposed else -2)
    return numbers.expand(1, heads, *((1, tokens) if transposed else (tokens, 1))).reshape(heads, tokens)


def _has_kernel(operands: Tensor, bias: Tensor | None) -> bool:
    if not (_compiling_for_gpu.get() and operands.is_cuda and _has_triton()):
        return False
    small = operands.dim() == 5 and operands.size(-2) <= MOST_TOKENS and operands.size(-1) <= MOST_CHANNELS
    learns = operands.requires_grad and (bias is None or (bias.is_floating_point() and not bias.requires_grad))
    return operands.dtype == torch.bfloat16 and operands.stride(-1) == 1 and small and learns


def _by_rows(quantizers: Sequence[ActivationQuantizer]) -> bool:
    """Whether each learns one scale for a row at most, and all of them drop, or none, in whole batches."""
    rows = [q.scale.shape[-2:-1] if place == 1 else q.scale.shape[-1:] for place, q in enumerate(quantizers)]
    learn = all(q.leaves is not None and q.scale.dim() <= 3 for q in quantizers) and set(rows) <= {(), (1,)}
    dropping = [q.dropping for q in quantizers]
    whole = all(drops is None for drops in dropping) or all(drops and drops[1] is None for drops in dropping)
    return learn and whole


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def is_in(graph: Graph) -> bool:
    """Whether something traced takes the kernel."""
    return any(node.target is torch.ops.fimaq.window_attention.default for node in graph.nodes)


@cache
def kernel_works(device: str = "cuda") -> bool:
    """Whether a small window goes through it on this device, forward and back."""
    operands = torch.zeros(3, 1, 1, 8, 16, device=device, dtype=torch.bfloat16)
    ranges = [torch.ones(shape, device=device) for shape in ((4, 1, 8), (4, 1, 8), 4)]
    given: Any = operands, None, ranges, [], 1.0, False
    try:
        window_attention_backward(window_attention(*given), *given)
    except Exception as error:  # of a compiler or a driver; everything has another way
        reason = str(error).strip().partition("\n")[0]
        warnings.warn(f"attention over windows runs without its kernel, and slower: {reason}", stacklevel=2)
        return False
    return True


class _WindowAttention(torch.autograd.Function):
    """Of query, key and value in one tensor, scales of queries, keys, values and weights by rows, and the rest."""

    @staticmethod
    def forward(ctx: Any, operands: Tensor, *others: Any) -> Tensor:
        ctx.save_for_backward(operands)
        ctx.fixed = others[4:]
        return window_attention(operands, *ctx.fixed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_operands, of_scales = window_attention_backward(grads[0], *ctx.saved_tensors, *ctx.fixed)
        of_query, of_key, *others = of_scales[..., None].unbind()
        return (of_operands, of_query, of_key.mT, *others, *(None for _ in ctx.fixed))


@torch.library.custom_op("fimaq::window_attention", mutates_args=())
def window_attention(
    operands: Tensor,
    bias: Tensor | None,
    ranges: Sequence[Tensor],
    drops: Sequence[Tensor],
    factor: float,
    normalised: bool,
) -> Tensor:
    """Q(softmax(Q(factor * query) Q(key)^T + bias)) Q(value): (windows, heads, tokens, width).

    Q is fake quantization where the bytes of `drops`, rows filled up to multiples of 8, are 0. `ranges` are scales
    and zero points (4, heads, tokens) and numbers of levels (4,), of queries, keys, values and weights. `bias`,
    contiguous and with its rows filled up likewise, broadcasts against the scores. If not `normalised`, the
    exponentials are quantized, of which the largest of a row is 1, and the product is divided by their sums, which
    do not learn.
    """
    from fimaq.quant import window_kernels

    out = _by_tokens(operands)
    window_kernels.forward((operands, bias, ranges, drops, factor, normalised), out)
    return out.transpose(1, 2)


@window_attention.register_fake
def _(operands: Tensor, *others: Any) -> Tensor:
    return _by_tokens(operands).transpose(1, 2)


@torch.library.custom_op("fimaq::window_attention_backward", mutates_args=())
def window_attention_backward(
    sent: Tensor,
    operands: Tensor,
    bias: Tensor | None,
    ranges: Sequence[Tensor],
    drops: Sequence[Tensor],
    factor: float,
    normalised: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of the operands, and of the scales of all rows (4, windows, heads, tokens)."""
    from fimaq.quant import window_kernels

    found = _empty_gradients(operands)
    sent = sent if sent.stride(-1) == 1 else sent.contiguous()
    window_kernels.backward((operands, bias, ranges, drops, factor, normalised), sent, *found)
    return found[0].permute(2, 0, 3, 1, 4), found[1]


@window_attention_backward.register_fake
def _(sent: Tensor, operands: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    found = _empty_gradients(operands)
    return found[0].permute(2, 0, 3, 1, 4), found[1]


def _by_tokens(operands: Tensor) -> Tensor:
    _, windows, heads, tokens, width = operands.shape
    return operands.new_empty(windows, tokens, heads, width)


def _empty_gradients(operands: Tensor) -> tuple[Tensor, Tensor]:
    _, windows, heads, tokens, width = operands.shape
    of_scales = operands.new_empty(4, windows, heads, tokens, dtype=torch.float32)
    return operands.new_empty(windows, tokens, 3, heads, width), of_scales
