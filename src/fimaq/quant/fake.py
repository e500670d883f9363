"""Uniform asymmetric quantization as pure functions of tensors.

A real value x becomes the integer q = clamp(round(x / scale) + zero_point, 0, levels) and stands for
(q - zero_point) * scale. `levels` is 2**bits - 1. Scales and zero points broadcast against x; zero points
are integers in [0, levels], stored as floats, so that zero is always represented exactly.
"""

from typing import Any

import torch
from torch import Tensor


def quantize(x: Tensor, scale: Tensor, zero_point: Tensor, levels: int) -> Tensor:
    """The integers (as floats in [0, levels]) that stand for x. Same shape as x."""
    return (torch.round(x / scale) + zero_point).clamp_(0, levels)


def dequantize(codes: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """The real values that integer codes stand for. Same shape as codes."""
    return (codes - zero_point) * scale


def fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor, levels: int) -> Tensor:
    """x rounded to what its integers can represent; no gradient is defined through the rounding."""
    return dequantize(quantize(x, scale, zero_point, levels), scale, zero_point)


class _LearnedScale(torch.autograd.Function):
    """Fake quantization with the straight-through gradient for x and the exact one for the scale.

    Written out because autograd's own chain stores and walks about twice as many full-size tensors.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, levels: int, dropped: Tensor | None
    ) -> Tensor:
        rounded = torch.round(x / scale)
        steps = torch.maximum(torch.minimum(rounded, levels - zero_point), -zero_point)
        inside = steps == rounded
        quantized = steps * scale
        ctx.save_for_backward(x, scale, steps, inside, dropped)
        return quantized if dropped is None else torch.where(dropped, x, quantized)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:  # type: ignore[override]
        x, scale, steps, inside, dropped = ctx.saved_tensors
        grad_x = grad_scale = None
        if ctx.needs_input_grad[0]:
            grad_x = grad * (inside if dropped is None else inside | dropped)
        if ctx.needs_input_grad[1]:
            slope = torch.where(inside, steps - x / scale, steps)
            reaching = grad if dropped is None else grad.masked_fill(dropped, 0)
            grad_scale = (reaching * slope).sum_to_size(scale.shape)
        return grad_x, grad_scale, None, None, None


def learned_fake_quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor, levels: int, dropped: Tensor | None = None
) -> Tensor:
    """Fake quantization that gradients pass through; where `dropped` is true, x is left as it is (QDrop)."""
    return _LearnedScale.apply(x, scale, zero_point, levels, dropped)  # type: ignore[no-any-return]


def random_mask(like: Tensor, probability: float) -> Tensor:
    """A boolean tensor shaped like `like`, each element true with `probability` (to 1/256).

    One 64-bit random number serves eight elements: random numbers, not arithmetic, would otherwise be the
    largest cost of a reconstruction step on a CPU.
    """
    count = like.numel()
    words = torch.empty((count + 7) // 8, dtype=torch.int64, device=like.device).random_(-(2**63), None)
    octets = words.view(torch.uint8)[:count].view(like.shape)
    return octets < round(probability * 256)
