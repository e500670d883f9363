"""Uniform asymmetric quantization as pure functions of tensors.

A real value x becomes the integer q = clamp(round(x / scale) + zero_point, 0, levels) and stands for
(q - zero_point) * scale. `levels` is 2**bits - 1. Scales and zero points broadcast against x; zero points
are integers in [0, levels], stored as floats, so that zero is always represented exactly.
"""

from typing import Any

import torch
from torch import Tensor

from fimaq.quant import blocks
from fimaq.quant.masks import chosen


def quantize(x: Tensor, scale: Tensor, zero_point: Tensor, levels: int) -> Tensor:
    """The integers (as floats in [0, levels]) that stand for x. Same shape as x."""
    return (torch.round(x / scale) + zero_point).clamp_(0, levels)


def dequantize(codes: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """The real values that integer codes stand for. Same shape as codes."""
    return (codes - zero_point) * scale


def fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor, levels: int) -> Tensor:
    """x rounded to what its integers can represent; no gradient is defined through the rounding.

    Counted from the zero point, and each result written over the one before: less memory traffic.
    """
    if blocks.fits(x, scale):
        return blocks.quantized(x, scale, zero_point, levels)
    return blocks.clamp_(torch.round(x / scale), -zero_point, levels - zero_point).mul_(scale)


def _forward(x: Tensor, scale: Tensor, zero_point: Tensor, levels: Tensor | int, dropped: Tensor | None) -> Tensor:
    if blocks.fits(x, scale):
        return blocks.quantized(x, scale, zero_point, levels, dropped)
    steps = torch.clamp(torch.round(x / scale), -zero_point, levels - zero_point)
    quantized = steps * scale
    return quantized if dropped is None else chosen(dropped, x, quantized)


def _backward(
    grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, levels: Tensor | int, dropped: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of x, where it is inside of the range or dropped, and of the scale, where it is not dropped.

    Large tensors are written over once they are not needed: without a compiler, new ones cost more than the
    arithmetic.
    """
    if blocks.fits(x, scale) and blocks.has_scales_for_each_image(x, scale):
        return blocks.gradients(grad, x, scale, zero_point, levels, dropped)
    scaled = x / scale
    rounded = torch.round(scaled)
    steps = torch.clamp(rounded, -zero_point, levels - zero_point)
    passes = steps == rounded
    if dropped is not None:
        passes = passes | dropped
    # In the type of x before anything else reads it, or a compiler stores it in the wider one.
    of_x = rounded.copy_(passes).mul_(grad).to(x.dtype)
    of_scale = steps.mul_(grad).addcmul_(scaled, of_x, value=-1)  # (steps - scaled where inside) * grad
    if dropped is not None:
        of_scale = of_scale.mul_(~dropped)
    return of_x, blocks.sum_to(scale, of_scale)


class _LearnedScale(torch.autograd.Function):
    """Fake quantization with the straight-through gradient for x and the exact one for the scale.

    The backward pass rounds x again instead of storing what the forward pass had: less memory, less traffic.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, levels: Tensor | int, dropped: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, scale, zero_point, dropped)
        ctx.levels = levels
        return _forward(x, scale, zero_point, levels, dropped)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x, scale, zero_point, dropped = ctx.saved_tensors
        return (*_backward(grads[0], x, scale, zero_point, ctx.levels, dropped), None, None, None)


def learned_fake_quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor, levels: Tensor | int, dropped: Tensor | None = None
) -> Tensor:
    """Fake quantization that gradients pass through; where `dropped` is true, x is left as it is (QDrop)."""
    return _LearnedScale.apply(x, scale, zero_point, levels, dropped)  # type: ignore[no-any-return]
