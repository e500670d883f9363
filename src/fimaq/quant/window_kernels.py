"""Quantized attention over a window of at most 64 tokens, each head of each window by one program, in Triton.

What `window_attention.py` describes. Scores and their softmax are never stored: the backward pass computes them
again. Tiles are SIDE tokens high; tokens beyond the window are zeros that nothing attends to.
"""

# Kernels have no types, for what they are given depends on what they are compiled for.
# mypy: allow-untyped-defs, allow-incomplete-defs

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fimaq.quant import masks

SIDE = 64
FORWARD: dict[str, int] = {"num_warps": 4}
BACKWARD: dict[str, int] = {"num_warps": 4, "maxnreg": 168}
"""How kernels are launched. With so many registers a multiprocessor runs three programs of 64 tokens at a time."""
LOG2_E = tl.constexpr(1.4426950408889634)
TO_WHOLE = tl.constexpr(12582912.0)
"""1.5 * 2^23: added to a float below 2^22 and taken away again, it leaves the nearest whole number."""
ALIGNED = tl.constexpr(masks.ALIGNED)
"""Rows of masks and biases are multiples of this, so that several elements are loaded at once."""
QUERY, KEY, VALUE, WEIGHTS = (tl.constexpr(i) for i in range(4))
"""Places of operands and of the four quantizers in what is packed."""


@triton.jit
def _quantized(
    x, which, scales, zero_points, highest, drops, rows, columns, tokens, row_of_mask, heads, DROPS: tl.constexpr
):
    """x (SIDE, columns) by the quantizer of its rows: the result, its slopes by x, 0 or 1, and by the scale."""
    place = (which * heads + tl.program_id(0) % heads) * tokens + rows
    scale = tl.load(scales + place, mask=rows < tokens, other=1.0)[:, None]
    zero_point = tl.load(zero_points + place, mask=rows < tokens, other=0.0)[:, None]
    scaled = x * (1 / scale)
    rounded = (scaled + TO_WHOLE) - TO_WHOLE
    steps = tl.minimum(tl.maximum(rounded, -zero_point), tl.load(highest + which) - zero_point)
    kept = steps * scale
    by_x = tl.where(steps == rounded, 1.0, 0.0)
    by_scale = steps - scaled * by_x
    if DROPS:
        first = tl.program_id(0).to(tl.int64) * (tokens * row_of_mask)
        there = (rows[:, None] < tokens) & (columns[None, :] < row_of_mask)  # with what fills rows up: whole words
        places = first + rows[:, None] * row_of_mask + columns[None, :]
        dropped = tl.load(drops + places, mask=there, other=0) != 0
        kept = tl.where(dropped, x, kept)
        by_x = tl.where(dropped, 1.0, by_x)
        by_scale = tl.where(dropped, 0.0, by_scale)
    return kept, by_x, by_scale


@triton.jit
def _operand(
    operands, part, stride_part, stride_token, factor, scales, zero_points, highest, drops,
    rows, channels, tokens, width, row_of_mask, heads, DROPS: tl.constexpr,
):  # fmt: skip
    """A window's queries, keys or values of one head, times a factor, as `_quantized` gives them.

    `operands` points to the first query.
    """
    places = part * stride_part + rows[:, None] * stride_token + channels[None, :]
    inside = (rows[:, None] < tokens) & (channels[None, :] < width)
    x = tl.load(operands + places, mask=inside, other=0.0).to(tl.float32) * factor
    return _quantized(
        x, part, scales, zero_points, highest, drops, rows, channels, tokens, row_of_mask, heads, DROPS
    )


@triton.jit
def _exponentials(query, key, bias, rows, columns, tokens, row_of_bias, HAS_BIAS: tl.constexpr):
    """exp(score - largest of its row), (SIDE, SIDE), and one over the sums of rows (SIDE, 1)."""
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    if HAS_BIAS:
        there = (rows[:, None] < tokens) & (columns[None, :] < row_of_bias)
        places = rows[:, None] * row_of_bias + columns[None, :]
        scores += tl.load(bias + places, mask=there, other=0.0).to(tl.float32)
    scores = tl.where(columns[None, :] < tokens, scores * LOG2_E, float("-inf"))
    powers = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return powers, (1 / tl.sum(powers, 1))[:, None]


@triton.jit
def _forward(
    operands, bias, scales, zero_points, highest, drop_queries, drop_keys, drop_values, drop_weights, out,
    of_part, of_window, of_head, of_token, bias_window, bias_head, factor, heads,
    tokens: tl.constexpr, width: tl.constexpr, row_of_mask: tl.constexpr, row_of_weights: tl.constexpr,
    HAS_BIAS: tl.constexpr, DROPS: tl.constexpr, NORMALISED: tl.constexpr,
    SIDE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    window, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    rows, columns, channels = tl.arange(0, SIDE), tl.arange(0, SIDE), tl.arange(0, CHANNELS)
    narrow = operands.dtype.element_ty
    operands += window * of_window + head * of_head
    bias += (window * bias_window + head * bias_head) * ALIGNED

    q, _, _ = _operand(
        operands, QUERY, of_part, of_token, factor, scales, zero_points, highest, drop_queries,
        rows, channels, tokens, width, row_of_mask, heads, DROPS,
    )  # fmt: skip
    k, _, _ = _operand(
        operands, KEY, of_part, of_token, 1.0, scales, zero_points, highest, drop_keys,
        rows, channels, tokens, width, row_of_mask, heads, DROPS,
    )  # fmt: skip
    q, k = q.to(narrow), k.to(narrow)
    x, one_by_sums = _exponentials(q, k, bias, rows, columns, tokens, row_of_weights, HAS_BIAS)
    if NORMALISED:
        x *= one_by_sums
    x, _, _ = _quantized(
        x, WEIGHTS, scales, zero_points, highest, drop_weights, rows, columns, tokens, row_of_weights, heads, DROPS
    )
    v, _, _ = _operand(
        operands, VALUE, of_part, of_token, 1.0, scales, zero_points, highest, drop_values,
        rows, channels, tokens, width, row_of_mask, heads, DROPS,
    )  # fmt: skip
    product = tl.dot(x.to(narrow), v.to(narrow), input_precision="ieee")
    if not NORMALISED:
        product *= one_by_sums
    places = ((window * tokens + rows[:, None]) * heads + head) * width + channels[None, :]
    tl.store(out + places, product.to(narrow), mask=(rows[:, None] < tokens) & (channels[None, :] < width))


@triton.jit
def _backward(
    operands, bias, scales, zero_points, highest, drop_queries, drop_keys, drop_values, drop_weights,
    sent, of_operands, of_scales,
    of_part, of_window, of_head, of_token, bias_window, bias_head, factor, heads,
    sent_window, sent_head, sent_token,
    tokens: tl.constexpr, width: tl.constexpr, row_of_mask: tl.constexpr, row_of_weights: tl.constexpr,
    HAS_BIAS: tl.constexpr, DROPS: tl.constexpr, NORMALISED: tl.constexpr,
    SIDE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    window, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    rows, columns, channels = tl.arange(0, SIDE), tl.arange(0, SIDE), tl.arange(0, CHANNELS)
    inside = (rows[:, None] < tokens) & (channels[None, :] < width)
    narrow = operands.dtype.element_ty
    operands += window * of_window + head * of_head
    bias += (window * bias_window + head * bias_head) * ALIGNED
    own = of_operands + (window * tokens + rows[:, None]) * 3 * heads * width
    of_query = own + head * width + channels[None, :]
    of_row = of_scales + tl.program_id(0) * tokens + rows
    all_rows = tl.num_programs(0) * tokens

    # Slopes of queries, keys and values are found when they are asked for: kept, they would not fit registers.
    q, _, _ = _operand(
        operands, QUERY, of_part, of_token, factor, scales, zero_points, highest, drop_queries,
        rows, channels, tokens, width, row_of_mask, heads, DROPS,
    )  # fmt: skip
    k, _, _ = _operand(
        operands, KEY, of_part, of_token, 1.0, scales, zero_points, highest, drop_keys,
        rows, channels, tokens, width, row_of_mask, heads, DROPS,
    )  # fmt: skip
    q, k = q.to(narrow), k.to(narrow)
    powers, one_by_sums = _exponentials(q, k, bias, rows, columns, tokens, row_of_weights, HAS_BIAS)
    places = window * sent_window + head * sent_head + rows[:, None] * sent_token + channels[None, :]
    gradient = tl.load(sent + places, mask=inside, other=0.0).to(tl.float32)
    if NORMALISED:
        x = powers * one_by_sums
    else:
        x = powers
        gradient *= one_by_sums
    gradient = gradient.to(narrow)

    v, _, _ = _operand(
        operands, VALUE, of_part, of_token, 1.0, scales, zero_points, highest, drop_values,
        rows, channels, tokens, width, row_of_mask, heads, DROPS,
    )  # fmt: skip
    found = tl.dot(gradient, tl.trans(v.to(narrow)), input_precision="ieee")
    weights, by_x, by_scale = _quantized(
        x, WEIGHTS, scales, zero_points, highest, drop_weights, rows, columns, tokens, row_of_weights, heads, DROPS
    )
    weights = weights.to(narrow)
    tl.store(of_row + WEIGHTS * all_rows, tl.sum(found * by_scale, 1), mask=rows < tokens)
    found *= by_x * x
    of_scores = (found - powers * (tl.sum(found, 1)[:, None] * one_by_sums)).to(narrow)

    found = tl.dot(tl.trans(weights), gradient, input_precision="ieee")
    _, by_x, by_scale = _operand(
        operands, VALUE, of_part, of_token, 1.0, scales, zero_points, highest, drop_values,
        rows, channels, tokens, width, row_of_mask, heads, DROPS,
    )  # fmt: skip
    tl.store(of_row + VALUE * all_rows, tl.sum(found * by_scale, 1), mask=rows < tokens)
    tl.store(of_query + VALUE * heads * width, (found * by_x).to(narrow), mask=inside)

    found = tl.dot(of_scores, k, input_precision="ieee")
    _, by_x, by_scale = _operand(
        operands, QUERY, of_part, of_token, factor, scales, zero_points, highest, drop_queries,
        rows, channels, tokens, width, row_of_mask, heads, DROPS,
    )  # fmt: skip
    tl.store(of_row + QUERY * all_rows, tl.sum(found * by_scale, 1), mask=rows < tokens)
    tl.store(of_query, (found * by_x * factor).to(narrow), mask=inside)

    found = tl.dot(tl.trans(of_scores), q, input_precision="ieee")
    _, by_x, by_scale = _operand(
        operands, KEY, of_part, of_token, 1.0, scales, zero_points, highest, drop_keys,
        rows, channels, tokens, width, row_of_mask, heads, DROPS,
    )  # fmt: skip
    tl.store(of_row + KEY * all_rows, tl.sum(found * by_scale, 1), mask=rows < tokens)
    tl.store(of_query + KEY * heads * width, (found * by_x).to(narrow), mask=inside)


Given = tuple[Tensor, Tensor | None, Sequence[Tensor], Sequence[Tensor], float, bool]
"""Operands, bias, ranges, masks, factor, and whether weights are normalised: as `window_attention` takes them."""


def forward(given: Given, out: Tensor) -> None:
    """`out`: (windows, tokens, heads, width), contiguous."""
    tensors, numbers, options = _arguments(given)
    _forward[_programs(given[0])](*tensors, out, *numbers, **options, **FORWARD)


def backward(given: Given, sent: Tensor, of_operands: Tensor, of_scales: Tensor) -> None:
    """`of_operands`: (windows, tokens, 3, heads, width); `of_scales`: (4, windows, heads, tokens); contiguous."""
    tensors, numbers, options = _arguments(given)
    numbers = [*numbers, *sent.stride()[:3]]
    _backward[_programs(given[0])](*tensors, sent, of_operands, of_scales, *numbers, **options, **BACKWARD)


def _programs(operands: Tensor) -> tuple[int]:
    return (operands.size(1) * operands.size(2),)


def _arguments(given: Given) -> tuple[list[Tensor], list[float], dict[str, Any]]:
    """Tensors and numbers in the order of the kernels' arguments, and what kernels are compiled for."""
    operands, bias, ranges, drops, factor, normalised = given
    _, windows, heads, tokens, width = operands.shape
    aligned = masks.ALIGNED
    row_of_mask, row_of_weights = (-(-size // aligned) * aligned for size in (width, tokens))
    strides = [0, 0] if bias is None else bias.expand(windows, heads, tokens, row_of_weights).stride()[:2]
    nothing = operands  # which is never read
    tensors = [operands, nothing if bias is None else bias, *ranges, *(drops or [nothing] * 4)]
    numbers = [*operands.stride()[:4], *(stride // aligned for stride in strides), factor, heads]
    options = {
        "tokens": tokens,
        "width": width,
        "row_of_mask": row_of_mask,
        "row_of_weights": row_of_weights,
        "HAS_BIAS": bias is not None,
        "DROPS": bool(drops),
        "NORMALISED": normalised,
        "SIDE": SIDE,
        "CHANNELS": max(16, triton.next_power_of_2(width)),
    }
    return tensors, numbers, options
