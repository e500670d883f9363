"""Random masks for QDrop from a counter: the same key gives the same masks on every device, compiled or not.

A hash of (key, position) takes the place of a generator. It keeps no state that a recorded CUDA graph would have
to advance. All bits that a step needs are drawn at once, 32 with one hash, and laid out as one byte each: what
reads a mask, in the forward pass and again in the backward pass, loads a byte per element and need not hash.
Rows of a mask are filled up to multiples of 8: where a GPU fills up what it masks (`aligned.py`), both lie alike.
"""

import torch
from torch import Tensor

from fimaq.quant import blocks

GOLDEN = 0x9E3779B9 - 2**32
"""2^32 divided by the golden ratio, as a signed integer: spreads consecutive numbers over all words."""
WORD = 32
ALIGNED = 8
"""Rows, of masks and of what a GPU multiplies, are filled up to multiples of this: 16 bytes in bf16."""
DIGITS = 8
"""Binary digits of a probability."""


def mixed(words: Tensor) -> Tensor:
    """A bijection of 32-bit words in which every bit of the input changes half of the output's bits."""
    words = words ^ _shifted(words, 16)
    words *= 0x85EBCA6B - 2**32
    words ^= _shifted(words, 13)
    words *= 0xC2B2AE35 - 2**32
    words ^= _shifted(words, 16)
    return words


def words_for(count: int) -> int:
    """How many words hold the bits of a mask of `count` elements."""
    return -(-count // WORD)


def random_words(count: int, probability: float, key: Tensor) -> Tensor:
    """(count,) int32: each bit is set with `probability` (to 1/256). `key`: int32 scalar.

    A probability is made of even odds, digit by digit: "or" with a random bit makes (1 + p) / 2 of p, "and" p / 2.
    """
    threshold = round(probability * 2**DIGITS)
    positions = torch.arange(count, dtype=torch.int32, device=key.device)
    words = positions.new_full((count,), -(threshold >> DIGITS))
    for digit in range(DIGITS):
        if threshold % 2 ** (digit + 1) == 0:
            continue  # "and" with nothing set so far
        drawn = mixed(positions + mixed(key + ((digit * GOLDEN + 2**31) % 2**32 - 2**31)))
        words = words | drawn if threshold >> digit & 1 else words & drawn
    return words


def unpacked(words: Tensor) -> Tensor:
    """The bits of words, lowest first, one byte each: (n,) -> (8 n,) int32, whose bytes are 0 or 1.

    Four bits become four bytes by one product: its terms put bit j at 8 j, and others where they are cut off.
    """
    shifts = torch.arange(0, WORD, 4, dtype=torch.int32, device=words.device)
    nibbles = (words[:, None] >> shifts) & 0b1111
    return (nibbles * (1 + 2**7 + 2**14 + 2**21) & 0x01010101).flatten()


def as_it_lies(like: Tensor) -> Tensor:
    """`like`, or its transpose if that is how its matrices lie in memory."""
    return like.mT if like.dim() > 2 and like.stride(-2) < like.stride(-1) else like


def mask_size(like: Tensor) -> int:
    """How many bits a mask of `like` takes, its rows filled up."""
    like = as_it_lies(like if like.dim() > 1 else like[:, None])
    return like.numel() // max(1, like.size(-1)) * _filled_up(like.size(-1))


def mask_of(like: Tensor, bits: Tensor, positions: Tensor | None = None) -> Tensor:
    """A boolean mask shaped like `like`, of random `bits`, of which there are at least `mask_size`.

    `positions` (n,): where `like` holds n rows of a larger batch, first dimension first, which rows these are;
    they get the mask that they have there. A matrix that is the transpose of how it lies in memory gets a mask
    that lies like it.
    """
    if like.dim() == 1:
        return mask_of(like[:, None], bits, positions)[:, 0]
    lying = as_it_lies(like)
    if lying is not like:
        return mask_of(lying, bits, positions).mT
    size, width = mask_size(like), _filled_up(like.size(-1))
    if positions is None or len(like) % len(positions):
        drawn = bits[:size]
    else:
        of_row = size // len(positions)
        drawn = bits[: len(bits) // of_row * of_row].view(-1, of_row).index_select(0, positions)
    return drawn.view(*like.shape[:-1], width)[..., : like.size(-1)]


def _filled_up(columns: int) -> int:
    return -(-columns // ALIGNED) * ALIGNED


def chosen(mask: Tensor, where_true: Tensor, where_false: Tensor) -> Tensor:
    """What `torch.where` gives, in the type of `where_false`. All have one shape."""
    where_true = where_true.to(where_false.dtype)
    learns = torch.is_grad_enabled() and (where_true.requires_grad or where_false.requires_grad)
    if blocks.on_cpu(where_false) and not learns:
        return blocks.replace_(where_false.clone(), mask, where_true)
    return torch.where(mask, where_true, where_false)


def _shifted(words: Tensor, bits: int) -> Tensor:
    """A shift to the right that fills with zeros: PyTorch's own repeats the sign."""
    shifted = words >> bits
    shifted &= 2 ** (32 - bits) - 1
    return shifted
