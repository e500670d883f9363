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

SIDE = 64
FORWARD: dict[str, int] = {"num_warps": 4}
BACKWARD: dict[str, int] = {"num_warps": 4, "maxnreg": 168}
"""How kernels are launched. With so many registers a multiprocessor runs three programs of 64 tokens at a time."""
LOG2_E = tl.constexpr(1.4426950408889634)
TO_WHOLE = tl.constexpr(12582912.0)
"""1.5 * 2^23: added to a float below 2^22 and taken away again, it leaves the nearest whole number, the even one of
two that are as near."""
QUERY, KEY, WEIGHTS, VALUE = (tl.constexpr(i) for i in range(4))
"""Places of the four quantizers in what is packed."""


@triton.jit
def _tile(tensor, place, stride_token, rows, channels, inside):
    """A window's tokens of one head: (SIDE, CHANNELS)."""
    return tl.load(tensor + place + rows[:, None] * stride_token + channels[None, :], mask=inside, other=0.0)


@triton.jit
def _quantized(
    x, which, scales, zero_points, highest, masks, rows, columns, inside, tokens, row_of_mask, heads,
    DROPS: tl.constexpr,
):  # fmt: skip
    """x (SIDE, columns) by the quantizer of its rows: the result, and what gradients need."""
    place = (which * heads + tl.program_id(0) % heads) * tokens + rows
    scale = tl.load(scales + place, mask=rows < tokens, other=1.0)[:, None]
    zero_point = tl.load(zero_points + place, mask=rows < tokens, other=0.0)[:, None]
    lowest, largest = -zero_point, tl.load(highest + which) - zero_point
    scaled = x / scale
    rounded = (tl.minimum(tl.maximum(scaled, lowest - 1), largest + 1) + TO_WHOLE) - TO_WHOLE
    steps = tl.minimum(tl.maximum(rounded, lowest), largest)
    if DROPS:
        first = tl.program_id(0).to(tl.int64) * tokens * row_of_mask
        dropped = tl.load(masks + first + rows[:, None] * row_of_mask + columns[None, :], mask=inside, other=0) != 0
    else:
        dropped = inside & (rows[:, None] < 0)
    return tl.where(dropped, x, steps * scale), scaled, steps, (steps == rounded) | dropped, dropped


@triton.jit
def _gradients(gradient, scaled, steps, passes, dropped):
    """Of what was quantized, and of the scale of each row."""
    of_x = tl.where(passes, gradient, 0.0)
    return of_x, tl.sum(tl.where(dropped, 0.0, steps * gradient - scaled * of_x), 1)


@triton.jit
def _exponentials(
    query, key, bias, bias_place, bias_row, bias_column, rows, columns, inside, tokens, HAS_BIAS: tl.constexpr
):
    """exp(score - largest of its row), (SIDE, SIDE), and sums of rows (SIDE,)."""
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    if HAS_BIAS:
        places = bias_place + rows[:, None] * bias_row + columns[None, :] * bias_column
        scores += tl.load(bias + places, mask=inside, other=0.0).to(tl.float32)
    scores = tl.where(columns[None, :] < tokens, scores, float("-inf"))
    powers = tl.exp2((scores - tl.max(scores, 1)[:, None]) * LOG2_E)
    return powers, tl.sum(powers, 1)


@triton.jit
def _forward(
    query, key, value, bias, scales, zero_points, highest, of_queries, of_keys, of_weights, of_values, out,
    q_window, q_head, q_token, k_window, k_head, k_token, v_window, v_head, v_token,
    bias_window, bias_head, bias_row, bias_column, factor, heads, tokens: tl.constexpr, width: tl.constexpr,
    row_of_mask: tl.constexpr, row_of_weights: tl.constexpr, HAS_BIAS: tl.constexpr, DROPS: tl.constexpr,
    NORMALISED: tl.constexpr, SIDE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """`of_queries` and so on are QDrop's masks."""
    window, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    rows, columns, channels = tl.arange(0, SIDE), tl.arange(0, SIDE), tl.arange(0, CHANNELS)
    inside = (rows[:, None] < tokens) & (channels[None, :] < width)
    square = (rows[:, None] < tokens) & (columns[None, :] < tokens)
    narrow = value.dtype.element_ty

    q = _tile(query, window * q_window + head * q_head, q_token, rows, channels, inside).to(tl.float32) * factor
    q, _, _, _, _ = _quantized(
        q, QUERY, scales, zero_points, highest, of_queries, rows, channels, inside, tokens, row_of_mask, heads, DROPS
    )
    k = _tile(key, window * k_window + head * k_head, k_token, rows, channels, inside).to(tl.float32)
    k, _, _, _, _ = _quantized(
        k, KEY, scales, zero_points, highest, of_keys, rows, channels, inside, tokens, row_of_mask, heads, DROPS
    )
    place = window * bias_window + head * bias_head
    weights, sums = _exponentials(
        q.to(narrow), k.to(narrow), bias, place, bias_row, bias_column, rows, columns, square, tokens, HAS_BIAS
    )
    if NORMALISED:
        weights /= sums[:, None]
    weights, _, _, _, _ = _quantized(
        weights, WEIGHTS, scales, zero_points, highest, of_weights, rows, columns, square, tokens, row_of_weights,
        heads, DROPS,
    )  # fmt: skip
    v = _tile(value, window * v_window + head * v_head, v_token, rows, channels, inside).to(tl.float32)
    v, _, _, _, _ = _quantized(
        v, VALUE, scales, zero_points, highest, of_values, rows, channels, inside, tokens, row_of_mask, heads, DROPS
    )
    product = tl.dot(weights.to(narrow), v.to(narrow), input_precision="ieee")
    if not NORMALISED:
        product /= sums[:, None]
    places = ((window * tokens + rows[:, None]) * heads + head) * width + channels[None, :]
    tl.store(out + places, product.to(narrow), mask=inside)


@triton.jit
def _backward(
    query, key, value, bias, scales, zero_points, highest, of_queries, of_keys, of_weights, of_values,
    sent, of_operands, of_scales,
    q_window, q_head, q_token, k_window, k_head, k_token, v_window, v_head, v_token,
    sent_window, sent_head, sent_token,
    bias_window, bias_head, bias_row, bias_column, factor, heads, tokens: tl.constexpr, width: tl.constexpr,
    row_of_mask: tl.constexpr, row_of_weights: tl.constexpr, HAS_BIAS: tl.constexpr, DROPS: tl.constexpr,
    NORMALISED: tl.constexpr, SIDE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    window, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    rows, columns, channels = tl.arange(0, SIDE), tl.arange(0, SIDE), tl.arange(0, CHANNELS)
    inside = (rows[:, None] < tokens) & (channels[None, :] < width)
    square = (rows[:, None] < tokens) & (columns[None, :] < tokens)
    narrow = value.dtype.element_ty
    of_token = of_operands + (window * tokens + rows[:, None]) * 3 * heads * width
    of_query = of_token + head * width + channels[None, :]
    of_key, of_value = of_query + heads * width, of_query + 2 * heads * width
    of_row = of_scales + tl.program_id(0) * tokens + rows
    all_rows = tl.num_programs(0) * tokens

    # What a quantizer's gradient needs is loaded and quantized again when it is: kept, it would not fit registers.
    q = _tile(query, window * q_window + head * q_head, q_token, rows, channels, inside).to(tl.float32) * factor
    q, _, _, _, _ = _quantized(
        q, QUERY, scales, zero_points, highest, of_queries, rows, channels, inside, tokens, row_of_mask, heads, DROPS
    )
    k = _tile(key, window * k_window + head * k_head, k_token, rows, channels, inside).to(tl.float32)
    k, _, _, _, _ = _quantized(
        k, KEY, scales, zero_points, highest, of_keys, rows, channels, inside, tokens, row_of_mask, heads, DROPS
    )
    q, k = q.to(narrow), k.to(narrow)
    place = window * bias_window + head * bias_head
    powers, sums = _exponentials(q, k, bias, place, bias_row, bias_column, rows, columns, square, tokens, HAS_BIAS)
    gradient = _tile(sent, window * sent_window + head * sent_head, sent_token, rows, channels, inside)
    gradient = gradient.to(tl.float32)
    if NORMALISED:
        plain = powers / sums[:, None]
    else:
        plain = powers
        gradient /= sums[:, None]
    gradient = gradient.to(narrow)
    v = _tile(value, window * v_window + head * v_head, v_token, rows, channels, inside).to(tl.float32)
    v, _, _, _, _ = _quantized(
        v, VALUE, scales, zero_points, highest, of_values, rows, channels, inside, tokens, row_of_mask, heads, DROPS
    )
    found = tl.dot(gradient, tl.trans(v.to(narrow)), input_precision="ieee")
    weights, scaled, steps, passes, dropped = _quantized(
        plain, WEIGHTS, scales, zero_points, highest, of_weights, rows, columns, square, tokens, row_of_weights,
        heads, DROPS,
    )  # fmt: skip
    weights = weights.to(narrow)
    found, of_scale = _gradients(found, scaled, steps, passes, dropped)
    tl.store(of_row + WEIGHTS * all_rows, of_scale, mask=rows < tokens)
    found *= plain
    of_scores = (found - powers * (tl.sum(found, 1) / sums)[:, None]).to(narrow)

    found = tl.dot(tl.trans(weights), gradient, input_precision="ieee")
    v = _tile(value, window * v_window + head * v_head, v_token, rows, channels, inside).to(tl.float32)
    v, scaled, steps, passes, dropped = _quantized(
        v, VALUE, scales, zero_points, highest, of_values, rows, channels, inside, tokens, row_of_mask, heads, DROPS
    )
    found, of_scale = _gradients(found, scaled, steps, passes, dropped)
    tl.store(of_value, found.to(narrow), mask=inside)
    tl.store(of_row + VALUE * all_rows, of_scale, mask=rows < tokens)

    found = tl.dot(of_scores, k, input_precision="ieee")
    x = _tile(query, window * q_window + head * q_head, q_token, rows, channels, inside).to(tl.float32) * factor
    x, scaled, steps, passes, dropped = _quantized(
        x, QUERY, scales, zero_points, highest, of_queries, rows, channels, inside, tokens, row_of_mask, heads, DROPS
    )
    found, of_scale = _gradients(found, scaled, steps, passes, dropped)
    tl.store(of_query, (found * factor).to(narrow), mask=inside)
    tl.store(of_row + QUERY * all_rows, of_scale, mask=rows < tokens)

    found = tl.dot(tl.trans(of_scores), q, input_precision="ieee")
    x = _tile(key, window * k_window + head * k_head, k_token, rows, channels, inside).to(tl.float32)
    x, scaled, steps, passes, dropped = _quantized(
        x, KEY, scales, zero_points, highest, of_keys, rows, channels, inside, tokens, row_of_mask, heads, DROPS
    )
    found, of_scale = _gradients(found, scaled, steps, passes, dropped)
    tl.store(of_key, found.to(narrow), mask=inside)
    tl.store(of_row + KEY * all_rows, of_scale, mask=rows < tokens)


def forward(
    operands: Sequence[Tensor], bias: Tensor | None, ranges: Sequence[Tensor], masks: Sequence[Tensor],
    factor: float, normalised: bool, out: Tensor,
) -> None:  # fmt: skip
    """`operands`: query, key, value. `out`: (windows, tokens, heads, width), contiguous."""
    strides = [s for t in operands for s in t.stride()[:3]]
    numbers, options = _arguments(operands[0], bias, masks, factor, normalised)
    tensors = _tensors(operands, bias, ranges, masks)
    _forward[_programs(operands[0])](*tensors, out, *strides, *numbers, **options, **FORWARD)


def backward(
    operands: Sequence[Tensor], bias: Tensor | None, ranges: Sequence[Tensor], masks: Sequence[Tensor],
    factor: float, normalised: bool, sent: Tensor, found: Sequence[Tensor],
) -> None:  # fmt: skip
    """`found`: gradients of the operands, (windows, tokens, 3, heads, width), and of scales, (4, windows, heads, tokens);
    contiguous."""
    strides = [s for t in (*operands, sent) for s in t.stride()[:3]]
    numbers, options = _arguments(operands[0], bias, masks, factor, normalised)
    tensors = _tensors(operands, bias, ranges, masks)
    _backward[_programs(operands[0])](*tensors, sent, *found, *strides, *numbers, **options, **BACKWARD)


def _programs(query: Tensor) -> tuple[int]:
    return (query.size(0) * query.size(1),)


def _tensors(
    operands: Sequence[Tensor], bias: Tensor | None, ranges: Sequence[Tensor], masks: Sequence[Tensor]
) -> list[Tensor]:
    """In the order of the kernels' arguments; what is missing is never read."""
    nothing = operands[0]
    return [*operands, nothing if bias is None else bias, *ranges, *(masks or [nothing] * 4)]


def _arguments(
    query: Tensor, bias: Tensor | None, masks: Sequence[Tensor], factor: float, normalised: bool
) -> tuple[list[float], dict[str, Any]]:
    """Numbers that follow the operands' strides, and what a kernel is compiled for."""
    windows, heads, tokens, width = query.shape
    strides = (query if bias is None else bias.expand(windows, heads, tokens, tokens)).stride()
    rows_of_masks = [-(-size // 8) * 8 for size in (width, tokens)]
    numbers = [*strides, factor, heads, tokens, width, *rows_of_masks]
    options = {
        "HAS_BIAS": bias is not None,
        "DROPS": bool(masks),
        "NORMALISED": normalised,
        "SIDE": SIDE,
        "CHANNELS": max(16, triton.next_power_of_2(width)),
    }
    return numbers, options
