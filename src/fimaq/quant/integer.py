"""Products of quantized tensors, computed on their integers: sums are exact, so every runtime gives the same bits.

A value is steps * scale, with whole numbers `steps` = code - zero point. Float sums of dequantized values round
differently in every library, and a low-bit network turns the last bit into another prediction for one image in six
(ViT-Tiny W4A4): a value on the edge of two codes falls to the other side, and the layers behind amplify it.
"""

import torch
from torch import Tensor

from fimaq.quant.blocks import clamp_

EXACT_BELOW = 2**24
"""Whole numbers that float32 holds exactly; sums that could be larger are computed in float64."""


def steps_of(x: Tensor, scale: Tensor, zero_point: Tensor, levels: int) -> Tensor:
    """Code minus zero point, as floats: the whole number of scales that quantized x is away from zero."""
    return clamp_((x / scale).round_(), -zero_point, levels - zero_point)


def exact_type(terms: int, left_levels: int, right_levels: int) -> torch.dtype:
    """The float type in which a sum of so many products of steps is exact."""
    return torch.float32 if terms * left_levels * right_levels < EXACT_BELOW else torch.float64
