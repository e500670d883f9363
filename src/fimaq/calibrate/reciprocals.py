"""Scales by which a product with the reciprocal divides.

Some runtimes multiply by 1 / scale, rounded to a float, instead of dividing by the scale: OpenVINO does. For most
scales that gives another last bit in a third of all values, and in a network of low-bit codes last bits matter
(`ties.py`). But of a thousand neighbouring floats one has a reciprocal that is nearly a float itself.
"""

import torch
from torch import Tensor, nn

from fimaq.quant.layers import activation_quantizers

CELL = 1024
"""Floats in a cell: 6e-5 to 1.2e-4 of a scale, about the first of 20,000 steps of learning."""


@torch.no_grad()
def make_scales_divisible(unit: nn.Module) -> None:
    """Change the scales in the last digits. Scales per token are left alone: no runtime takes them."""
    for _, quantizer in activation_quantizers(unit):
        if quantizer.scale.numel() == 1:
            quantizer.set_range(divisible(quantizer.scale), quantizer.zero_point)


def divisible(scale: Tensor) -> Tensor:
    """The float in the cell of this one that differs least from the reciprocal of its own reciprocal.

    Cells lie at fixed places, so that scales which differ in the last bit, as two processes have them, become one.
    """
    if scale.dtype != torch.float32:
        return scale
    bits = scale.reshape(1).view(torch.int32)
    cell = bits - bits % CELL + torch.arange(CELL, dtype=torch.int32, device=scale.device)
    floats = torch.cat([bits, cell]).view(torch.float32)  # the scale itself where no other is better
    errors = (floats.double() * floats.reciprocal().double() - 1).abs()
    return floats[errors.nan_to_num(nan=torch.inf, posinf=torch.inf).argmin()].reshape(scale.shape)
