"""QDrop's masks: the right share of true values, independent of each other and of other keys, for any shape."""

import pytest
import torch
from torch import Tensor

from fimaq.quant.masks import WORD, mask_of, mask_size, mixed, random_words, unpacked, words_for


def seed(number: int) -> Tensor:
    return torch.tensor(number, dtype=torch.int32)


KEY = seed(-1_234_567_890)
COUNT = 100_000
"""Values in a mask whose statistics are looked at: the correlation of two independent ones is 0.003 or so."""


def bits(count: int, probability: float = 0.5, key: Tensor = KEY) -> Tensor:
    """At least `count` random bits, boolean."""
    return unpacked(random_words(words_for(count), probability, key)).view(torch.bool)


def signs(key: Tensor) -> Tensor:
    """A mask of even odds as -1 and 1: the mean of a product of two is their correlation."""
    return 2 * bits(COUNT, key=key)[:COUNT].double() - 1


@pytest.mark.parametrize("shape", [(1,), (7,), (8,), (9,), (3, 5, 7), (2, 3, 4, 0)])
def test_a_mask_has_the_shape_of_its_tensor(shape):
    mask = mask_of(torch.zeros(shape), bits(128))
    assert mask.shape == shape
    assert mask.dtype == torch.bool


@pytest.mark.parametrize(("count", "words"), [(0, 0), (1, 1), (31, 1), (32, 1), (33, 2), (1000, 32)])
def test_there_are_words_enough_and_no_more(count, words):
    assert words_for(count) == words


@pytest.mark.parametrize("probability", [0.1, 0.25, 1 / 3, 0.5, 0.9, 255 / 256])
def test_bits_are_set_as_often_as_asked(probability):
    assert bits(COUNT, probability).double().mean().item() == pytest.approx(probability, abs=0.008)


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_a_probability_of_zero_or_one_holds_for_every_value(probability):
    assert (bits(COUNT, probability) == bool(probability)).all()


@pytest.mark.parametrize("probability", [0.25, 0.5])
def test_neighbours_in_a_mask_are_independent(probability):
    mask = bits(COUNT, probability).double() - probability
    spread = probability * (1 - probability)
    for distance in (*range(1, 10), 31, 32, 33, 64):
        correlation = (mask[distance:] * mask[:-distance]).mean() / spread
        assert abs(correlation) < 0.02, f"at distance {distance}"


@pytest.mark.parametrize("column", [1, 3, 32, 64, 192, 197])
def test_the_rows_of_a_mask_are_independent(column):
    """As many true values in each column as chance would give: nothing repeats with the width of a tensor."""
    rows = signs(KEY)[: COUNT // column * column].view(-1, column)
    deviations = rows.sum(0) / len(rows) ** 0.5
    assert deviations.abs().max() < 5


SEEDS = {
    "consecutive seeds": [seed(n) for n in range(8)],
    "seeds either side of zero": [seed(n) for n in (-2, -1, 0, 1)],
    "mixed seeds": [mixed(seed(n)) for n in range(8)],
}


@pytest.mark.parametrize("keys", SEEDS.values(), ids=SEEDS)
def test_masks_of_different_keys_are_independent(keys):
    masks = torch.stack([signs(mixed(key)) for key in keys])
    for shift in (0, 1, 4, 32):  # a mask must not be its neighbour's, moved along, either
        correlations = masks[:, shift:] @ masks[:, : COUNT - shift].T / COUNT
        others = correlations[~torch.eye(len(keys), dtype=torch.bool)]
        assert others.abs().max() < 0.02, f"moved by {shift}"


def test_the_same_key_gives_the_same_words():
    first, again = (random_words(99, 0.3, KEY) for _ in range(2))
    assert torch.equal(first, again)


def test_words_need_no_random_generator():
    state = torch.get_rng_state()
    random_words(99, 0.3, KEY)
    assert torch.equal(torch.get_rng_state(), state)


def test_unpacked_words_are_their_bits_lowest_first():
    words = [0, 1, -1, 2**31 - 1, -(2**31), 123_456_789]
    found = unpacked(torch.tensor(words, dtype=torch.int32)).view(torch.bool)
    assert found.tolist() == [bool(word >> bit & 1) for word in words for bit in range(WORD)]


@pytest.mark.parametrize("start", [-(2**31), -(2**17), 0, 2**31 - 2**18])
def test_mixing_maps_no_two_words_to_one(start):
    words = torch.arange(start, start + 2**18).to(torch.int32)
    assert len(mixed(words).unique()) == len(words)


def test_mixing_changes_half_of_the_bits_whichever_bit_of_the_input_changes():
    words = torch.randint(-(2**31), 2**31, (2000,)).to(torch.int32)
    for bit in range(32):
        changed = mixed(words) ^ mixed(words ^ (1 << bit if bit < 31 else -(2**31)))
        flipped = torch.stack([(changed >> b) & 1 for b in range(32)]).double().mean(1)
        assert (flipped - 0.5).abs().max() < 0.1, f"input bit {bit}"


def test_mixing_is_the_known_finaliser():
    """MurmurHash3's fmix32, in Python's own integers."""

    def finaliser(word: int) -> int:
        word = (word ^ (word >> 16)) * 0x85EBCA6B % 2**32
        word = (word ^ (word >> 13)) * 0xC2B2AE35 % 2**32
        return word ^ (word >> 16)

    words = [0, 1, 2**31 - 1, -1, -(2**31), 987_654_321, -42]
    found = [word % 2**32 for word in mixed(torch.tensor(words, dtype=torch.int32)).tolist()]
    assert found == [finaliser(word % 2**32) for word in words]


@pytest.mark.parametrize("shape", [(8, 6, 4), (8, 3, 7), (8, 5), (16, 3, 3)])
def test_rows_of_a_batch_get_the_masks_they_have_in_the_whole_batch(shape):
    """Two rows for an image in the last shape, as windows are."""
    drawn = bits(mask_size(torch.zeros(shape)))
    whole = mask_of(torch.zeros(shape), drawn).unflatten(0, (8, -1))
    positions = torch.tensor([6, 0, 3], dtype=torch.int32)
    few = mask_of(torch.zeros(3 * shape[0] // 8, *shape[1:]), drawn, positions).unflatten(0, (3, -1))
    assert torch.equal(few, whole[[6, 0, 3]])


def test_what_does_not_belong_to_rows_of_the_batch_gets_the_same_mask_in_each_part():
    table, drawn = torch.zeros(7, 5), bits(56)
    positions = torch.tensor([6, 0, 3], dtype=torch.int32)
    assert torch.equal(mask_of(table, drawn, positions), mask_of(table, drawn))


@pytest.mark.parametrize("positions", [None, torch.tensor([1, 0], dtype=torch.int32)], ids=["whole", "rows"])
def test_the_mask_of_a_transpose_lies_in_memory_as_it_does(positions):
    matrices, drawn = torch.zeros(2, 3, 5, 8), bits(240)
    mask = mask_of(matrices.mT, drawn, positions)
    assert torch.equal(mask, mask_of(matrices, drawn, positions).mT)
    assert mask.stride() == matrices.mT.stride()


def test_a_matrix_that_is_filled_up_has_the_mask_it_has_without():
    """A GPU adds columns that nothing attends to; what it learns must be what a CPU learns."""
    drawn = bits(2 * 3 * 5 * 16)
    assert torch.equal(
        mask_of(torch.zeros(2, 3, 5, 16), drawn)[..., :13], mask_of(torch.zeros(2, 3, 5, 13), drawn)
    )


@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 3, 8), (4, 9), (2, 5, 3, 7)])
def test_no_bit_serves_two_elements_and_all_fit_into_the_size(shape):
    like = torch.zeros(shape)
    for each in (like, like.mT):
        places = mask_of(each, torch.arange(mask_size(each)))
        assert places.shape == each.shape
        assert len(places.unique()) == each.numel()


def test_numbers_of_which_each_image_has_one_are_masked_like_any_others():
    """As many bits for each image as for a row, so that any batch finds its own."""
    drawn = bits(mask_size(torch.zeros(64)))
    whole = mask_of(torch.zeros(64), drawn)
    assert whole.shape == (64,)
    assert 0 < whole.float().mean() < 1
    positions = torch.tensor([40, 3, 63], dtype=torch.int32)
    assert torch.equal(mask_of(torch.zeros(3), drawn, positions), whole[positions.long()])
