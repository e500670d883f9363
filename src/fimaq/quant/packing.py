"""Dense packing of b-bit integers: a 3-bit weight takes three bits in the file, not eight.

Bit order: value `i` fills bits `i*b` to `i*b + b - 1` of the stream, least significant bit first, and stream
bit `j` is `(byte[j >> 3] >> (j & 7)) & 1`; the unused high bits of the last byte are zero.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

GROUP = 8
"""Eight b-bit values fill exactly b bytes, so they can be handled as one 64-bit word for every b up to 8."""


def packed_size(count: int, bits: int) -> int:
    """Bytes that `count` values of `bits` bits take: `ceil(count * bits / 8)`."""
    return (count * bits + 7) // 8


def pack_bits(values: Tensor, bits: int) -> Tensor:
    """Pack integers into a dense little-endian bit stream, in row-major order.

    Args:
        values: uint8, any shape, each in `[0, 2**bits - 1]`.
        bits: 2 to 8.

    Returns:
        uint8, shape `[ceil(values.numel() * bits / 8)]`, on the device of `values`.
    """
    _check_bits(bits)
    _check_dtype("values", values)
    flat = values.reshape(-1)
    if flat.numel() > 0 and (largest := int(flat.max())) >= 2**bits:
        raise ValueError(f"values must be in [0, {2**bits - 1}] to fit {bits} bits, found {largest}")

    groups = math.ceil(flat.numel() / GROUP)
    padded = flat.new_zeros(groups * GROUP)
    padded[: flat.numel()] = flat
    columns = padded.view(groups, GROUP)
    words = torch.zeros(groups, dtype=torch.int64, device=values.device)
    for position in range(GROUP):
        words |= columns[:, position].to(torch.int64) << (position * bits)
    packed = torch.empty(groups, bits, dtype=torch.uint8, device=values.device)
    for byte in range(bits):
        # The shift copies the sign bit of a full word; the mask takes those copies off again.
        packed[:, byte] = (words >> (8 * byte)) & 0xFF
    # A copy, so that the padding is neither kept in memory nor written with the storage.
    return packed.view(-1)[: packed_size(flat.numel(), bits)].clone()


def unpack_bits(packed: Tensor, bits: int, shape: Sequence[int]) -> Tensor:
    """The inverse of `pack_bits`.

    Args:
        packed: uint8, shape `[ceil(prod(shape) * bits / 8)]`.
        bits: 2 to 8, as given to `pack_bits`.
        shape: the shape of the values that were packed.

    Returns:
        uint8, shape `shape`, each in `[0, 2**bits - 1]`, on the device of `packed`.
    """
    _check_bits(bits)
    _check_dtype("packed", packed)
    count = math.prod(shape)
    expected = packed_size(count, bits)
    if packed.dim() != 1 or packed.numel() != expected:
        raise ValueError(
            f"packed has shape {list(packed.shape)}, but {bits}-bit values of shape {list(shape)} "
            f"take [{expected}] bytes"
        )

    groups = math.ceil(count / GROUP)
    padded = packed.new_zeros(groups * bits)
    padded[:expected] = packed
    rows = padded.view(groups, bits)
    words = torch.zeros(groups, dtype=torch.int64, device=packed.device)
    for byte in range(bits):
        words |= rows[:, byte].to(torch.int64) << (8 * byte)
    values = torch.empty(groups, GROUP, dtype=torch.uint8, device=packed.device)
    for position in range(GROUP):
        values[:, position] = (words >> (position * bits)) & (2**bits - 1)
    return values.view(-1)[:count].clone().view(tuple(shape))


def _check_bits(bits: int) -> None:
    if isinstance(bits, bool) or not isinstance(bits, int) or not 2 <= bits <= 8:
        raise ValueError(f"bits must be an integer from 2 to 8, not {bits!r}")


def _check_dtype(name: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.uint8:
        raise ValueError(f"{name} must be torch.uint8, not {tensor.dtype}")
