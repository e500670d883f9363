"""Products of two activations as a GPU makes them fast while they are learned.

cuBLAS has its fast kernels only for matrices whose rows start at multiples of 16 bytes, and most ViTs have 197
tokens, Swin 49. So keys and values are filled up with tokens of zeros. And gradients come out as their tensors lie
in memory: read across, they would cost several times as much.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fimaq.quant.masks import ALIGNED


def spare_tokens(key: Tensor) -> int:
    """How many tokens to add to keys (..., tokens, channels) while a GPU learns."""
    return -key.size(-2) % ALIGNED if key.is_cuda and key.requires_grad else 0


def filled_product(left: Tensor, right: Tensor, spare: int) -> Tensor:
    """left (..., n, k + rows) @ right (..., k, m), with rows and `spare` columns of zeros added to the right."""
    rows = left.size(-1) - right.size(-2)
    if right.stride(-2) < right.stride(-1) and left.shape[:-2] == right.shape[:-2]:
        return _TimesTranspose.apply(*_as_multiplied(left, _filled_up(right.mT, spare, rows)))  # type: ignore[no-any-return]
    return torch.matmul(left, _filled_up(right, rows, spare))


def _filled_up(x: Tensor, rows: int, columns: int) -> Tensor:
    return F.pad(x, (0, columns, 0, rows)) if rows or columns else x


class _TimesTranspose(torch.autograd.Function):
    """left (..., n, k) @ right^T, for `right` (..., m, k) as it lies in memory: so does its gradient."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right)
        return torch.matmul(left, right.mT)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        left, right = ctx.saved_tensors
        return torch.matmul(grads[0], right), torch.matmul(grads[0].mT, left)


def _as_multiplied(*operands: Tensor) -> tuple[Tensor, ...]:
    """In the type that autocast multiplies in: it does not reach into the backward pass of a function."""
    device = operands[0].device.type
    if not torch.is_autocast_enabled(device):
        return operands
    return tuple(operand.to(torch.get_autocast_dtype(device)) for operand in operands)


class _Unbound(torch.autograd.Function):
    """x.unbind(dim), with gradients put together in the order in which x lies in memory.

    Queries, keys and values are views of what one Linear gave, permuted. Stacked as views, their gradients would
    have to be copied into the order of that Linear's output.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> tuple[Tensor, ...]:
        strides = x.stride()
        ctx.order = sorted(range(x.dim()), key=lambda d: -strides[d])
        ctx.dim = dim % x.dim()
        return x.unbind(dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        others = [d - (d > ctx.dim) for d in ctx.order if d != ctx.dim]
        stacked = torch.stack([grad.permute(others) for grad in grads], ctx.order.index(ctx.dim))
        back = [ctx.order.index(d) for d in range(stacked.dim())]
        return stacked.permute(back), None


def unbind(input: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    """torch.unbind, with gradients that lie in memory as the input does."""
    return _Unbound.apply(input, dim)  # type: ignore[no-any-return]
