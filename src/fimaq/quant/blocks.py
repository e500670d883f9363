"""Fake quantization as a CPU is fast at it: the values of `fake.py`, sooner.

An operator on a large tensor waits for memory, and the chain has a dozen of them. So it is run on a few images at
a time, which stay in the processor's cache from the first operator to the last. And where a library has several
operators for one thing, their speeds differ: `clamp` between tensors takes four times as long as a maximum and a
minimum, booleans take seven times as long to become numbers as the bytes that they are, and a comparison takes
four times as long with a boolean result as with a number.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

BLOCK = 2**19
"""Elements at a time: 2 MiB, so that the half dozen tensors of a chain fit a cache; half or twice is as fast."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By their size in bytes."""
LONG_ROW, PIECE = 512, 256
"""Elements of a row beyond which, and pieces in which, a gradient is summed up."""


def on_cpu(x: Tensor) -> bool:
    """Whether x is really on a CPU, and nobody looks on: not what stands for a tensor in a trace, nor a batch of
    torch.func's."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    return type(x) is Tensor and x.device.type == "cpu" and not is_functorch_wrapped_tensor(x)


def fits(x: Tensor, scale: Tensor) -> bool:
    """Whether x can be quantized block by block: nothing is noted for gradients then."""
    if torch.is_grad_enabled() and (x.requires_grad or scale.requires_grad):
        return False
    return on_cpu(x) and x.dtype == scale.dtype and x.dim() > 0 and _broadcast(scale, x) and len(x) > 0


def has_scales_for_each_image(x: Tensor, scale: Tensor) -> bool:
    """Whether gradients of scales can be summed up block by block, too."""
    return scale.dim() == x.dim() and len(scale) == len(x)


def quantized(
    x: Tensor, scale: Tensor, zero_point: Tensor, levels: Tensor | int, dropped: Tensor | None = None
) -> Tensor:
    """What the integers of x stand for; x itself where it is dropped."""
    lowest, highest = -zero_point, levels - zero_point
    result = torch.empty_like(x)
    for rows in _blocks(x):
        own, own_scale, out = x[rows], _of(scale, x, rows), result[rows]
        torch.div(own, own_scale, out=out).round_()
        clamp_(out, _of(lowest, x, rows), _of(highest, x, rows)).mul_(own_scale)
        if dropped is not None:
            replace_(out, dropped[rows], own)
    return result


def gradients(
    grad: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor, levels: Tensor | int, dropped: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the scale, which has elements for each image."""
    lowest, highest = -zero_point, levels - zero_point
    result, of_scale = torch.empty_like(x), torch.empty_like(scale)
    for rows in _blocks(x):
        own, of_x = grad[rows], result[rows]
        scaled = x[rows] / scale[rows]
        passes = torch.round(scaled)
        steps = clamp_(passes.clone(), _of(lowest, x, rows), _of(highest, x, rows))
        torch.eq(steps, passes, out=passes)
        if dropped is not None:
            kept = numbers(dropped[rows], x)
            torch.maximum(passes, kept, out=passes)
        torch.mul(passes, own, out=of_x)
        terms = steps.mul_(own).addcmul_(scaled, of_x, value=-1)
        if dropped is not None:
            terms.addcmul_(terms, kept, value=-1)
        of_scale[rows] = sum_to(scale[rows], terms)
    return result, of_scale


def sum_to(scale: Tensor, of_elements: Tensor) -> Tensor:
    """The sums (shaped like `scale`) of what each element says of the scale that it has.

    Rows first, and long ones in pieces: the kernel that computes the elements can sum up each in registers, and
    they need not be stored.
    """
    if of_elements.dim() > 0 and (scale.dim() == 0 or scale.size(-1) == 1):
        row = of_elements.size(-1)
        if row > LONG_ROW and row % PIECE == 0:
            of_elements = of_elements.unflatten(-1, (-1, PIECE)).sum(-1, dtype=scale.dtype)
        of_elements = of_elements.sum(-1, keepdim=True, dtype=scale.dtype)
    return of_elements.sum_to_size(scale.shape)


def clamp_(x: Tensor, lowest: Tensor, highest: Tensor) -> Tensor:
    """x.clamp_(lowest, highest)."""
    if not on_cpu(x) or x.requires_grad:
        return x.clamp_(lowest, highest)
    return torch.minimum(torch.maximum(x, lowest, out=x), highest, out=x)


def replace_(x: Tensor, mask: Tensor, other: Tensor) -> Tensor:
    """x, written over with `other` (of its type and shape) where `mask` is true; without gradients.

    Bit by bit: a processor guesses a random branch wrong every other time, so that `torch.where` takes eight times
    as long.
    """
    whole = INTEGERS[x.element_size()]
    differing = x.view(whole).bitwise_xor(other.view(whole))
    differing &= numbers(mask, differing).neg_()  # all bits or none
    x.view(whole).bitwise_xor_(differing)
    return x


def numbers(mask: Tensor, like: Tensor) -> Tensor:
    """1 where a boolean mask is true, else 0, in the type of `like`."""
    return (mask.view(torch.uint8) if on_cpu(mask) else mask).to(like.dtype)


def _blocks(x: Tensor) -> Iterator[slice]:
    images = max(1, BLOCK // max(1, x[0].numel()))
    return (slice(first, first + images) for first in range(0, len(x), images))


def _of(values: Tensor, x: Tensor, rows: slice) -> Tensor:
    """The part of what broadcasts against x that belongs to these images."""
    return values[rows] if has_scales_for_each_image(x, values) else values


def _broadcast(scale: Tensor, x: Tensor) -> bool:
    """Whether x / scale has the shape of x."""
    own = x.shape[x.dim() - scale.dim() :] if scale.dim() <= x.dim() else None
    return own is not None and all(one in (1, size) for one, size in zip(scale.shape, own, strict=True))
