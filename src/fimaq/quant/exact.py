"""Steps in floating point that every library computes to the same bit.

Adding, multiplying, dividing and taking a square root are rounded alike everywhere; sums of many terms, exp and
erf are not. A low-bit network amplifies the last bit: a value on the edge of two codes falls to the other side,
and some layers later the whole image is rounded differently. Two remedies, both far finer than quantization:

* Terms are first rounded to a grid so coarse that their sum fits into the 24 bits of a float. Then every partial
  sum is exact, in whatever order it is made.
* What goes into a GELU is rounded to a grid on which no value comes to lie between two codes of what comes out.
"""

import math

import torch
from torch import Tensor, nn

SIGNIFICAND = 24


@torch.library.custom_op("fimaq::on_grid", mutates_args=())
def on_grid(x: Tensor, offset: float) -> Tensor:
    """x rounded to multiples of the last bit of `offset`, a float32 much larger than x."""
    return (x + offset) - offset


@on_grid.register_fake
def _(x: Tensor, offset: float) -> Tensor:
    return torch.empty_like(x)


on_grid.register_autograd(lambda ctx, gradient: (gradient, None))  # as if nothing were rounded


def offset_for(step: float) -> float:
    """What to add and take away again to round to multiples of a power of two, not below `step`."""
    return 1.5 * 2.0 ** (SIGNIFICAND - 1 + math.ceil(math.log2(step)))


def step_of(offset: float) -> float:
    """The grid that an offset rounds to."""
    return offset / 1.5 / 2.0 ** (SIGNIFICAND - 1)


SOFTMAX_STEP = 2.0**-12
SOFTMAX_OFFSET = offset_for(SOFTMAX_STEP)
"""For elements in 0..1: sums of up to 4096 of them are exact."""


class ExactLayerNorm(nn.LayerNorm):
    """nn.LayerNorm over the last dimension, with mean and variance of the input as `offset` rounds it."""

    offset: float

    def forward(self, x: Tensor) -> Tensor:
        rounded = on_grid(x, self.offset)
        mean = rounded.mean(-1, keepdim=True)
        variance = (rounded * rounded).mean(-1, keepdim=True) - mean * mean
        normalised = (x - mean) / torch.sqrt(variance.clamp_min(0) + self.eps)
        if self.weight is not None:
            normalised = normalised * self.weight
        return normalised if self.bias is None else normalised + self.bias


def exact_layer_norm(norm: nn.LayerNorm, offset: float) -> None:
    """Turn a LayerNorm into its exact form, in place."""
    norm.__class__ = ExactLayerNorm
    norm.offset = offset  # type: ignore[assignment]


def exponentials(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Scores (..., n, k) -> exp(score - largest of the row) on a grid, and its exact sums (..., n, 1).

    Their quotient is the softmax.
    """
    powers = on_grid(torch.exp(scores - scores.amax(-1, keepdim=True)), SOFTMAX_OFFSET)
    return powers, powers.sum(-1, keepdim=True)
