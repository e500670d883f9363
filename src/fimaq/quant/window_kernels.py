"""Quantized attention over a window of at most 64 tokens, each head of each window by one program, in Triton.

What `window_attention.py` describes. Scores and their softmax are never stored: the backward pass computes them
again. Tiles are SIDE tokens high; tokens beyond the window are zeros that nothing attends to.
"""

from collections.abc import Sequence
from typing import Any

import torch
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
"""1.5 * 2^23: added to a float below 2^22 and taken away again, it leaves the nearest whole number, the even one of
two that are as near."""
ALIGNED = tl.constexpr(masks.ALIGNED)
"""Elements that rows of masks and biases are multiples of, so that several are loaded at once."""
QUERY, KEY, WEIGHTS, VALUE = (tl.constexpr(i) for i in range(4))
"""Places of the four quantizers in what is packed."""


@triton.jit
def _tile(tensor, place, stride_token, rows, channels, inside):
    """A window's tokens of one head: (SIDE, CHANNELS)."""
    return tl.load(tensor + place + rows[:, None] * stride_token + channels[None, :], mask=inside, other=0.0)


@triton.jit
def _quantized(
    x, which, scales, zero_points, highest, drops, rows, columns, tokens, row_of_mask, heads, DROPS: tl.constexpr
):  # fmt: skip
    """x (SIDE, columns) by the quantizer of its rows: the result, and its slopes by x (0 or 1) and by the scale."""
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
def _exponentials(
    query, key, bias, bias_place, rows, columns, tokens, row_of_bias, HAS_BIAS: tl.constexpr
):  # fmt: skip
    """exp(score - largest of its row), (SIDE, SIDE), and one over the sums of rows (SIDE, 1)."""
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    if HAS_BIAS:
        there = (rows[:, None] < tokens) & (columns[None, :] < row_of_bias)
        places = bias_place * ALIGNED + rows[:, None] * row_of_bias + columns[None, :]
        scores += tl.load(bias + places, mask=there, other=0.0).to(tl.float32)
    scores = tl.where(columns[None, :] < tokens, scores * LOG2_E, float("-inf"))
    powers = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return powers, (1 / tl.sum(powers, 1))[:, None]


@triton.jit
def _forward(
    query, key, value, bias, scales, zero_points, highest, of_queries, of_keys, of_weights, of_values, out,
    q_window, q_head, q_token, k_window, k_head, k_token, v_window, v_head, v_token,
    bias_window, bias_head, factor, heads, tokens: tl.constexpr, width: tl.constexpr,
    row_of_mask: tl.constexpr, row_of_weights: tl.constexpr, HAS_BIAS: tl.constexpr, DROPS: tl.constexpr,
    NORMALISED: tl.constexpr, SIDE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """`of_queries` and so on are QDrop's masks."""
    window, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    rows, columns, channels = tl.arange(0, SIDE), tl.arange(0, SIDE), tl.arange(0, CHANNELS)
    inside = (rows[:, None] < tokens) & (channels[None, :] < width)
    narrow = value.dtype.element_ty

    q = _tile(query, window * q_window + head * q_head, q_token, rows, channels, inside).to(tl.float32) * factor
    q, _, _ = _quantized(
        q, QUERY, scales, zero_points, highest, of_queries, rows, channels, tokens, row_of_mask, heads, DROPS
    )
    k = _tile(key, window * k_window + head * k_head, k_token, rows, channels, inside).to(tl.float32)
    k, _, _ = _quantized(
        k, KEY, scales, zero_points, highest, of_keys, rows, channels, tokens, row_of_mask, heads, DROPS
    )
    place = window * bias_window + head * bias_head
    weights, one_by_sums = _exponentials(
        q.to(narrow), k.to(narrow), bias, place, rows, columns, tokens, row_of_weights, HAS_BIAS
    )
    if NORMALISED:
        weights *= one_by_sums
    weights, _, _ = _quantized(
        weights, WEIGHTS, scales, zero_points, highest, of_weights, rows, columns, tokens, row_of_weights, heads, DROPS,
    )  # fmt: skip
    v = _tile(value, window * v_window + head * v_head, v_token, rows, channels, inside).to(tl.float32)
    v, _, _ = _quantized(
        v, VALUE, scales, zero_points, highest, of_values, rows, channels, tokens, row_of_mask, heads, DROPS
    )
    product = tl.dot(weights.to(narrow), v.to(narrow), input_precision="ieee")
    if not NORMALISED:
        product *= one_by_sums
    places = ((window * tokens + rows[:, None]) * heads + head) * width + channels[None, :]
    tl.store(out + places, product.to(narrow), mask=inside)


@triton.jit
def _backward(
    query, key, value, bias, scales, zero_points, highest, of_queries, of_keys, of_weights, of_values,
    sent, of_operands, of_scales,
    q_window, q_head, q_token, k_window, k_head, k_token, v_window, v_head, v_token,
    sent_window, sent_head, sent_token,
    bias_window, bias_head, factor, heads, tokens: tl.constexpr, width: tl.constexpr,
    row_of_mask: tl.constexpr, row_of_weights: tl.constexpr, HAS_BIAS: tl.constexpr, DROPS: tl.constexpr,
    NORMALISED: tl.constexpr, SIDE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    window, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    rows, columns, channels = tl.arange(0, SIDE), tl.arange(0, SIDE), tl.arange(0, CHANNELS)
    inside = (rows[:, None] < tokens) & (channels[None, :] < width)
    narrow = value.dtype.element_ty
    of_token = of_operands + (window * tokens + rows[:, None]) * 3 * heads * width
    of_query = of_token + head * width + channels[None, :]
    of_key, of_value = of_query + heads * width, of_query + 2 * heads * width
    of_row = of_scales + tl.program_id(0) * tokens + rows
    all_rows = tl.num_programs(0) * tokens

    # What a quantizer's gradient needs is loaded and quantized again when it is: kept, it would not fit registers.
    q = _tile(query, window * q_window + head * q_head, q_token, rows, channels, inside).to(tl.float32) * factor
    q, _, _ = _quantized(
        q, QUERY, scales, zero_points, highest, of_queries, rows, channels, tokens, row_of_mask, heads, DROPS
    )
    k = _tile(key, window * k_window + head * k_head, k_token, rows, channels, inside).to(tl.float32)
    k, _, _ = _quantized(
        k, KEY, scales, zero_points, highest, of_keys, rows, channels, tokens, row_of_mask, heads, DROPS
    )
    q, k = q.to(narrow), k.to(narrow)
    place = window * bias_window + head * bias_head
    powers, one_by_sums = _exponentials(q, k, bias, place, rows, columns, tokens, row_of_weights, HAS_BIAS)
    gradient = _tile(sent, window * sent_window + head * sent_head, sent_token, rows, channels, inside)
    gradient = gradient.to(tl.float32)
    if NORMALISED:
        plain = powers * one_by_sums
    else:
        plain = powers
        gradient *= one_by_sums
    gradient = gradient.to(narrow)
    v = _tile(value, window * v_window + head * v_head, v_token, rows, channels, inside).to(tl.float32)
    v, _, _ = _quantized(
        v, VALUE, scales, zero_points, highest, of_values, rows, channels, tokens, row_of_mask, heads, DROPS
    )
    found = tl.dot(gradient, tl.trans(v.to(narrow)), input_precision="ieee")
    weights, by_x, by_scale = _quantized(
        plain, WEIGHTS, scales, zero_points, highest, of_weights, rows, columns, tokens, row_of_weights, heads, DROPS,
    )  # fmt: skip
    weights = weights.to(narrow)
    tl.store(of_row + WEIGHTS * all_rows, tl.sum(found * by_scale, 1), mask=rows < tokens)
    found *= by_x * plain
    of_scores = (found - powers * (tl.sum(found, 1)[:, None] * one_by_sums)).to(narrow)

    found = tl.dot(tl.trans(weights), gradient, input_precision="ieee")
    v = _tile(value, window * v_window + head * v_head, v_token, rows, channels, inside).to(tl.float32)
    v, by_x, by_scale = _quantized(
        v, VALUE, scales, zero_points, highest, of_values, rows, channels, tokens, row_of_mask, heads, DROPS
    )
    tl.store(of_row + VALUE * all_rows, tl.sum(found * by_scale, 1), mask=rows < tokens)
    tl.store(of_value, (found * by_x).to(narrow), mask=inside)

    found = tl.dot(of_scores, k, input_precision="ieee")
    x = _tile(query, window * q_window + head * q_head, q_token, rows, channels, inside).to(tl.float32) * factor
    x, by_x, by_scale = _quantized(
        x, QUERY, scales, zero_points, highest, of_queries, rows, channels, tokens, row_of_mask, heads, DROPS
    )
    tl.store(of_row + QUERY * all_rows, tl.sum(found * by_scale, 1), mask=rows < tokens)
    tl.store(of_query, (found * by_x * factor).to(narrow), mask=inside)

    found = tl.dot(tl.trans(of_scores), q, input_precision="ieee")
    x = _tile(key, window * k_window + head * k_head, k_token, rows, channels, inside).to(tl.float32)
    x, by_x, by_scale = _quantized(
        x, KEY, scales, zero_points, highest, of_keys, rows, channels, tokens, row_of_mask, heads, DROPS
    )
    tl.store(of_row + KEY * all_rows, tl.sum(found * by_scale, 1), mask=rows < tokens)
    tl.store(of_key, (found * by_x).to(narrow), mask=inside)


def forward(
    operands: Sequence[Tensor], bias: Tensor | None, ranges: Sequence[Tensor], dropped: Sequence[Tensor],
    factor: float, normalised: bool, out: Tensor,
) -> None:  # fmt: skip
    """`operands`: query, key, value. `out`: (windows, tokens, heads, width), contiguous."""
    strides = [s for t in operands for s in t.stride()[:3]]
    numbers, options = _arguments(operands[0], bias, dropped, factor, normalised)
    tensors = _tensors(operands, bias, ranges, dropped)
    _forward[_programs(operands[0])](*tensors, out, *strides, *numbers, **options, **FORWARD)


def backward(
    operands: Sequence[Tensor], bias: Tensor | None, ranges: Sequence[Tensor], dropped: Sequence[Tensor],
    factor: float, normalised: bool, sent: Tensor, found: Sequence[Tensor],
) -> None:  # fmt: skip
    """`found`: gradients of the operands, (windows, tokens, 3, heads, width), and of scales, (4, windows, heads, tokens);
    contiguous."""
    strides = [s for t in (*operands, sent) for s in t.stride()[:3]]
    numbers, options = _arguments(operands[0], bias, dropped, factor, normalised)
    tensors = _tensors(operands, bias, ranges, dropped)
    _backward[_programs(operands[0])](*tensors, sent, *found, *strides, *numbers, **options, **BACKWARD)


def _programs(query: Tensor) -> tuple[int]:
    return (query.size(0) * query.size(1),)


def _tensors(
    operands: Sequence[Tensor], bias: Tensor | None, ranges: Sequence[Tensor], dropped: Sequence[Tensor]
) -> list[Tensor]:
    """In the order of the kernels' arguments; what is missing is never read."""
    nothing = operands[0]
    return [*operands, nothing if bias is None else bias, *ranges, *(dropped or [nothing] * 4)]


def _arguments(
    query: Tensor, bias: Tensor | None, dropped: Sequence[Tensor], factor: float, normalised: bool
) -> tuple[list[float], dict[str, Any]]:
    """Numbers that follow the operands' strides, and what a kernel is compiled for."""
    windows, heads, tokens, width = query.shape
    rows_of_masks = [-(-size // ALIGNED.value) * ALIGNED.value for size in (width, tokens)]
    strides = (query if bias is None else bias.expand(windows, heads, tokens, rows_of_masks[1])).stride()[:2]
    numbers = [*(stride // ALIGNED.value for stride in strides), factor, heads, tokens, width, *rows_of_masks]
    options = {
        "HAS_BIAS": bias is not None,
        "DROPS": bool(dropped),
        "NORMALISED": normalised,
        "SIDE": SIDE,
        "CHANNELS": max(16, triton.next_power_of_2(width)),
    }
    return numbers, options
