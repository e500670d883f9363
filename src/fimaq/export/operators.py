"""The integer steps of an exported model as operators of PyTorch's own graph, so that an exporter can see them.

They compute what they say, so a lowered model runs in PyTorch too. Activations travel in 8-bit containers whatever
their own number of bits: `low` and `high` are the codes of their own range.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.library.custom_op("fimaq::quantize", mutates_args=())
def quantize(x: Tensor, scale: Tensor, zero_point: Tensor, low: int, high: int) -> Tensor:
    """x as integers of zero_point's type, clamped to [low, high]. Scale and zero point: one for the tensor."""
    codes = torch.round(x / scale) + zero_point
    return codes.clamp_(low, high).to(zero_point.dtype)


@quantize.register_fake
def _(x: Tensor, scale: Tensor, zero_point: Tensor, low: int, high: int) -> Tensor:
    return torch.empty_like(x, dtype=zero_point.dtype)


@torch.library.custom_op("fimaq::multiply", mutates_args=())
def multiply(
    left: Tensor,
    left_scale: Tensor,
    left_zero_point: Tensor,
    right: Tensor,
    right_scale: Tensor,
    right_zero_point: Tensor,
) -> Tensor:
    """The product of what two matrices of integers stand for: (..., n, k), (..., k, m) -> (..., n, m).

    The right one may have a scale and a zero point per column. Sums of integers are exact, in double precision
    here and in 32-bit integers in a runtime, so that both give the same bits.
    """
    whole = [(c.double() - z.double()) for c, z in ((left, left_zero_point), (right, right_zero_point))]
    return torch.matmul(*whole).float() * (left_scale * right_scale)


@multiply.register_fake
def _(left: Tensor, _left_scale: Tensor, _left_zero_point: Tensor, right: Tensor, *_: Tensor) -> Tensor:
    return torch.matmul(left.float(), right.float())


def _convolve(
    codes: Tensor,
    zero_point: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """A convolution of integers (codes - zero_point) with integer weights, as float: sums of whole numbers.

    `padding`: left, right, top, bottom.
    """
    whole = F.pad(codes.to(torch.float32) - zero_point.to(torch.float32), padding)
    return torch.conv2d(whole, weight.to(torch.float32), None, stride, 0, dilation, groups)


convolve = torch.library.custom_op("fimaq::convolve", _convolve, mutates_args=())
convolve.register_fake(_convolve)
