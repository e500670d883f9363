"""Operators in forms that are cheaper on a GPU, for steps that are compiled.

The largest element-wise kernels of a step wait for instructions more than for memory: a library's erf alone is
half of what a quantized GELU computes. What is given up are last bits, about 1e-6 of a GELU. And gradients of
weights are sums over all tokens of a batch, of which a library adds up parts in a kernel of its own; the compiler
does that in the kernel that reads them.
"""

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

LOG2_E = math.log2(math.e)
SINGLE_AT_MOST = (torch.float32, torch.bfloat16, torch.float16)
TAIL = (-1.0000033, -1.1510179, -0.45952675, -0.05222055, 0.0072295424, -0.00049250165)
"""Coefficients, lowest first, of a polynomial that fits log2 of the normal distribution's tail, Phi(-|x|), with an
error of Phi of at most 1.2e-6. It falls for all |x| > 6, where it is below -30."""
TILE, TILES_AT_ONCE = 64, 264
"""Rows and columns that one multiprocessor makes of a product, and how many such tiles keep a GPU busy."""
MOST_PIECES, SHORTEST = 8, 256
"""What is read again and again should be few, and what a tile adds up many."""


def normal_cdf(x: Tensor) -> Tensor:
    """Phi(x) with five products and one power of two."""
    size = x.abs()
    exponent = torch.full_like(x, TAIL[-1])
    for coefficient in reversed(TAIL[:-1]):
        exponent = exponent * size + coefficient
    tail = torch.exp2(exponent)
    return torch.where(x >= 0, 1 - tail, tail)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    if approximate != "none" or x.dtype not in SINGLE_AT_MOST:
        return NotImplemented
    wide = x.float()
    return (wide * normal_cdf(wide)).to(x.dtype)


def gelu_backward(grad: Tensor, x: Tensor, approximate: str = "none") -> Tensor:
    if approximate != "none" or x.dtype not in SINGLE_AT_MOST:
        return NotImplemented
    wide = x.float()
    density = exp(-0.5 * wide * wide) * (1 / math.sqrt(2 * math.pi))
    return (grad.float() * (normal_cdf(wide) + wide * density)).to(x.dtype)


def exp(x: Tensor) -> Tensor:
    if x.dtype not in SINGLE_AT_MOST:
        return NotImplemented
    return torch.exp2(x.float() * LOG2_E).to(x.dtype)


def mm(left: Tensor, right: Tensor) -> Tensor:
    """left (n, k) @ right (k, m), for a long k as the sum of products of pieces, made at once."""
    pieces = pieces_of(left.shape[1], left.shape[0], right.shape[1])
    if pieces == 1:
        return NotImplemented
    products = torch.bmm(left.unflatten(1, (pieces, -1)).transpose(0, 1), right.unflatten(0, (pieces, -1)))
    wide = torch.promote_types(left.dtype, torch.float32)
    # Added one by one, not as a sum over a dimension: that the compiler fuses with whatever reads it.
    return reduce(torch.add, (product.to(wide) for product in products.unbind())).to(left.dtype)


def pieces_of(inner: int, rows: int, columns: int) -> int:
    """Into how many pieces to cut sums of `inner` terms, so that all of a GPU has something to multiply."""
    tiles = -(-rows // TILE) * -(-columns // TILE)
    wanted = min(MOST_PIECES, TILES_AT_ONCE // tiles, inner // SHORTEST)
    return next((pieces for pieces in range(wanted, 1, -1) if inner % pieces == 0), 1)


CHEAPER: dict[Any, Callable[..., Any]] = {
    aten.gelu.default: gelu,
    aten.gelu_backward.default: gelu_backward,
    aten.exp.default: exp,
    aten.mm.default: mm,
}
"""What replaces an operator while it is traced. What answers `NotImplemented` is traced as it is."""
