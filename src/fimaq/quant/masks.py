"""Random masks for QDrop from a counter: the same key gives the same mask on every device, compiled or not.

A hash of (key, position) takes the place of a generator. It keeps no state that a recorded CUDA graph would have
to advance, a compiler can fuse it into whatever reads the mask, and a backward pass can make the mask again
instead of loading it.
"""

import torch
from torch import Tensor

GOLDEN = 0x9E3779B9 - 2**32
"""2^32 divided by the golden ratio, as a signed integer: spreads consecutive numbers over all words."""


def mixed(words: Tensor) -> Tensor:
    """A bijection of 32-bit words in which every bit of the input changes half of the output's bits."""
    words = words ^ _shifted(words, 16)
    words *= 0x85EBCA6B - 2**32
    words ^= _shifted(words, 13)
    words *= 0xC2B2AE35 - 2**32
    words ^= _shifted(words, 16)
    return words


def mask_key(seed: Tensor, number: int) -> Tensor:
    """A key for the `number`-th mask that is made under one seed (an int32 scalar)."""
    return mixed(seed + ((number * GOLDEN + 2**31) % 2**32 - 2**31))


def random_mask(like: Tensor, probability: float, key: Tensor, positions: Tensor | None = None) -> Tensor:
    """A boolean tensor shaped like `like`, each element true with `probability` (to 1/256).

    `key`: int32 scalar. Each 32-bit word of the hash serves four elements. `positions` (n,): where `like` holds n
    rows of a larger batch, first dimension first, which rows these are; they get the mask that they have there.
    """
    threshold = round(probability * 256)
    if threshold == 0:
        return torch.zeros_like(like, dtype=torch.bool)
    octets = _octets_by_element if like.is_cuda else _octets_by_word
    if positions is None or len(like) % len(positions):
        return (octets(like.numel(), key) <= threshold - 1).view(like.shape)
    of_rows = octets(like.numel() // len(positions), key, positions)
    return (of_rows <= threshold - 1).view(like.shape)


def chosen(mask: Tensor, where_true: Tensor, where_false: Tensor) -> Tensor:
    """What `torch.where` gives, of finite values, as arithmetic without branches.

    A CPU guesses a random branch wrong every other time: 4.8 million values take 30 ms with `torch.where`, 5 so.
    """
    return torch.lerp(where_false, where_true.to(where_false.dtype), mask.to(where_false.dtype))


def _octets_by_word(count: int, key: Tensor, rows: Tensor | None = None) -> Tensor:
    """Fewest operations: one hash for four octets. Integers in [0, 255], (count,), or (n * count,) for n rows."""
    if rows is None:
        return _octets_from(0, count, key)
    if count % 4 == 0:  # no word serves two rows
        words = torch.arange(count // 4, dtype=torch.int32, device=key.device) + rows[:, None] * (count // 4)
        return mixed(words + key).view(torch.uint8).flatten()
    return torch.cat([_octets_from(row * count, count, key) for row in rows.tolist()])


def _octets_from(first: int, count: int, key: Tensor) -> Tensor:
    words = torch.arange(first // 4, (first + count + 3) // 4, dtype=torch.int32, device=key.device)
    return mixed(words + key).view(torch.uint8)[first % 4 : first % 4 + count]


def _octets_by_element(count: int, key: Tensor, rows: Tensor | None = None) -> Tensor:
    """The same numbers element by element, which fuses into the kernel that reads them."""
    position = torch.arange(count, dtype=torch.int32, device=key.device)
    if rows is not None:
        position = (rows[:, None] * count + position).flatten()
    words = mixed((position >> 2) + key)
    return (words >> ((position & 3) << 3)) & 255


def _shifted(words: Tensor, bits: int) -> Tensor:
    """A shift to the right that fills with zeros: PyTorch's own repeats the sign."""
    shifted = words >> bits
    shifted &= 2 ** (32 - bits) - 1
    return shifted
