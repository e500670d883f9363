"""The packed weights: exact size, exact values, and the bit order that the documentation promises."""

import pytest
import torch

from fimaq.quant.packing import pack_bits, packed_size, unpack_bits

ALL_BITS = range(2, 9)
SHAPES = [(0,), (1,), (3,), (7,), (8,), (9,), (17,), (3, 5), (2, 3, 7), (64, 33), (4, 0, 2), ()]


def random_values(shape: tuple[int, ...], bits: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(bits * 1000 + len(shape))
    return torch.randint(0, 2**bits, shape, generator=generator, dtype=torch.uint8)


def reference_stream(values: list[int], bits: int) -> bytes:
    """The same stream as one big Python integer."""
    stream = sum(value << (index * bits) for index, value in enumerate(values))
    return stream.to_bytes((len(values) * bits + 7) // 8, "little")


@pytest.mark.parametrize("bits", ALL_BITS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_survive_in_exactly_the_promised_bytes(shape, bits):
    values = random_values(shape, bits)
    packed = pack_bits(values, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (-(-values.numel() * bits // 8),)
    assert packed.numel() == packed_size(values.numel(), bits) == packed.untyped_storage().nbytes()
    restored = unpack_bits(packed, bits, shape)
    assert restored.dtype == torch.uint8
    assert restored.shape == torch.Size(shape)
    assert torch.equal(restored, values)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_stream_is_the_documented_one(bits):
    values = random_values((101,), bits)
    assert bytes(pack_bits(values, bits).tolist()) == reference_stream(values.tolist(), bits)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_largest_values_do_not_leak_into_their_neighbours(bits):
    values = torch.tensor([2**bits - 1, 0] * 9, dtype=torch.uint8)
    packed = pack_bits(values, bits)
    assert bytes(packed.tolist()) == reference_stream(values.tolist(), bits)
    assert torch.equal(unpack_bits(packed, bits, (18,)), values)


def test_three_bit_example_by_hand():
    # 1 = 001, 2 = 010, 7 = 111: the stream reads ..0 111 010 001 from the high end.
    assert pack_bits(torch.tensor([1, 2, 7], dtype=torch.uint8), 3).tolist() == [0b11010001, 0b1]


def test_non_contiguous_values_are_packed_in_row_major_order():
    values = random_values((5, 7), 3).t()
    assert torch.equal(pack_bits(values, 3), pack_bits(values.contiguous(), 3))


@pytest.mark.parametrize("bits", range(2, 8))
def test_a_value_that_does_not_fit_is_named(bits):
    with pytest.raises(ValueError, match=rf"\[0, {2**bits - 1}\].*found {2**bits}"):
        pack_bits(torch.tensor([0, 2**bits], dtype=torch.uint8), bits)


@pytest.mark.parametrize("bits", [0, 1, 9, 4.0, True])
def test_impossible_bits_are_named(bits):
    with pytest.raises(ValueError, match=f"from 2 to 8, not {bits}"):
        pack_bits(torch.zeros(1, dtype=torch.uint8), bits)
    with pytest.raises(ValueError, match=f"from 2 to 8, not {bits}"):
        unpack_bits(torch.zeros(1, dtype=torch.uint8), bits, (1,))


def test_wrong_dtypes_are_named():
    with pytest.raises(ValueError, match=r"values must be torch.uint8, not torch.int64"):
        pack_bits(torch.zeros(1, dtype=torch.int64), 4)
    with pytest.raises(ValueError, match=r"packed must be torch.uint8, not torch.int8"):
        unpack_bits(torch.zeros(1, dtype=torch.int8), 4, (1,))


@pytest.mark.parametrize("length", [0, 2, 4])
def test_a_stream_of_the_wrong_length_is_refused(length):
    with pytest.raises(ValueError, match=r"3-bit values of shape \[2, 4\] take \[3\] bytes"):
        unpack_bits(torch.zeros(length, dtype=torch.uint8), 3, (2, 4))
    with pytest.raises(ValueError, match=r"shape \[1, 3\]"):
        unpack_bits(torch.zeros(1, 3, dtype=torch.uint8), 3, (2, 4))
