"""The two quantizers: activations with a learned scale, weights with learned rounding (AdaRound)."""

import torch
from torch import Tensor, nn

from fimaq.quant.fake import fake_quantize, learned_fake_quantize, quantize
from fimaq.quant.integer import steps_of
from fimaq.quant.masks import as_it_lies, mask_of

STRETCH_LOW, STRETCH_HIGH = -0.1, 1.1
"""AdaRound's rectified sigmoid is stretched beyond [0, 1] so that it reaches both ends at finite input."""


def rectified_sigmoid(rounding: Tensor) -> Tensor:
    """h(V) of AdaRound: how far each weight is rounded up, in [0, 1]."""
    return (torch.sigmoid(rounding) * (STRETCH_HIGH - STRETCH_LOW) + STRETCH_LOW).clamp(0, 1)


def _soft_weight(rounding: Tensor, weight: Tensor, scale: Tensor, zero_point: Tensor, levels: Tensor) -> Tensor:
    steps = torch.floor(weight / scale) + rectified_sigmoid(rounding)
    return torch.clamp(steps, -zero_point, levels - zero_point) * scale


def rounding_indecision(rounding: Tensor, exponent: Tensor) -> Tensor:
    """AdaRound's regulariser: sum of 1 - |2 h(V) - 1|^b, zero when every weight is rounded up or down."""
    return (1 - (2 * rectified_sigmoid(rounding) - 1).abs().pow(exponent)).sum()


class Quantizer(nn.Module):
    """A range of 2**bits levels: `scale` and `zero_point` broadcast against what is quantized."""

    scale: Tensor
    zero_point: Tensor
    highest: Tensor

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("zero_point", torch.zeros(()))
        # `levels` as a tensor: a compiled reconstruction step then serves every number of bits.
        self.register_buffer("highest", torch.tensor(float(self.levels)), persistent=False)

    @property
    def levels(self) -> int:
        return 2**self.bits - 1

    def set_range(self, scale: Tensor, zero_point: Tensor) -> None:
        self.scale = scale.detach().clone()
        self.zero_point = zero_point.detach().clone()

    def extra_repr(self) -> str:
        return f"bits={self.bits}, scale_shape={tuple(self.scale.shape)}"


class ActivationQuantizer(Quantizer):
    """Quantizes one activation tensor. `scale` has shape () per tensor, else broadcasts per head or token."""

    def __init__(self, bits: int) -> None:
        super().__init__(bits)
        self.dropping: tuple[Tensor, Tensor | None] | None = None
        """While a step of reconstruction runs: what `mask_of` is told for QDrop's mask of this quantizer."""
        self.leaves: list[Tensor] | None = None
        """While a step runs, for each call: `scale` by rows of what is quantized, and so its gradient."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return fake_quantize(x, self.scale, self.zero_point, self.levels)
        dropped = None if self.dropping is None else mask_of(x, *self.dropping)
        return learned_fake_quantize(x, self.learned_scale(x), self.zero_point, self.highest, dropped)

    def learned_scale(self, x: Tensor) -> Tensor:
        """The scale, while a step runs by rows of x."""
        if self.leaves is None:
            return self.scale
        self.leaves.append(for_each_row(self.scale.detach(), x).requires_grad_())
        return self.leaves[-1]

    def steps(self, x: Tensor) -> Tensor:
        """The whole number of scales that quantized x is away from zero."""
        return steps_of(x, self.scale, self.zero_point, self.levels)


def for_each_row(scale: Tensor, x: Tensor) -> Tensor:
    """`scale` as a view with an element for each row of x, as x lies in memory; as it is if a row has several."""
    lying = as_it_lies(x)
    across = -1 if lying is x else -2
    if scale.dim() >= -across and scale.size(across) > 1:
        return scale
    rows = list(x.shape)
    rows[across] = 1
    return scale.expand(torch.broadcast_shapes(scale.shape, rows))


class WeightQuantizer(Quantizer):
    """Quantizes a weight per output channel. `scale` and `zero_point`: (out, 1, ...).

    Rounds to nearest until `start_learning`, then by the learned `rounding` (same shape as the weight) whose
    rectified sigmoid says how far each weight is rounded up.
    """

    rounding: Tensor | None

    def __init__(self, bits: int) -> None:
        super().__init__(bits)
        self.register_buffer("rounding", None, persistent=False)

    def start_learning(self, weight: Tensor) -> None:
        """Set `rounding` so that the soft weight equals the real weight wherever that is in range."""
        scaled = weight.detach() / self.scale
        fraction = scaled - scaled.floor()
        self.rounding = -torch.log((STRETCH_HIGH - STRETCH_LOW) / (fraction - STRETCH_LOW) - 1)

    def codes(self, weight: Tensor) -> Tensor:
        """The integers the weight ends with, as floats in [0, levels]: learned rounding made hard."""
        if self.rounding is None:
            return quantize(weight, self.scale, self.zero_point, self.levels)
        up = (self.rounding >= 0).to(weight.dtype)
        return (torch.floor(weight / self.scale) + up + self.zero_point).clamp_(0, self.levels)

    def forward(self, weight: Tensor) -> Tensor:
        if self.rounding is None:
            return fake_quantize(weight, self.scale, self.zero_point, self.levels)
        return _soft_weight(self.rounding, weight, self.scale, self.zero_point, self.highest)
