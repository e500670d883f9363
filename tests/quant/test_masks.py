"""QDrop's masks: the right share of true values, independent of each other and of other keys, for any shape."""

import pytest
import torch
from torch import Tensor

from fimaq.quant.masks import _octets_by_element, _octets_by_word, mask_key, mixed, random_mask


def seed(number: int) -> Tensor:
    return torch.tensor(number, dtype=torch.int32)


KEY = seed(-1_234_567_890)
COUNT = 100_000
"""Values in a mask whose statistics are looked at: the correlation of two independent ones is 0.003 or so."""


def signs(key: Tensor) -> Tensor:
    """A mask of even odds as -1 and 1: the mean of a product of two is their correlation."""
    return 2 * random_mask(torch.zeros(COUNT), 0.5, key).double() - 1


@pytest.mark.parametrize("shape", [(), (1,), (7,), (8,), (9,), (3, 5, 7), (2, 3, 4, 0)])
def test_a_mask_has_the_shape_of_its_tensor(shape):
    mask = random_mask(torch.zeros(shape), 0.5, KEY)
    assert mask.shape == shape
    assert mask.dtype == torch.bool


@pytest.mark.parametrize("probability", [0.1, 0.25, 0.5, 0.9])
def test_a_mask_is_true_as_often_as_asked(probability):
    mask = random_mask(torch.zeros(333, 301), probability, KEY)
    assert mask.double().mean().item() == pytest.approx(probability, abs=0.008)


@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_a_probability_of_zero_or_one_holds_for_every_value(probability):
    assert (random_mask(torch.zeros(COUNT), probability, KEY) == bool(probability)).all()


def test_neighbours_in_a_mask_are_independent():
    mask = signs(KEY)
    for distance in range(1, 10):
        correlation = (mask[distance:] * mask[:-distance]).mean()
        assert abs(correlation) < 0.02, f"at distance {distance}"


@pytest.mark.parametrize("column", [1, 3, 64, 192, 197])
def test_the_rows_of_a_mask_are_independent(column):
    """As many true values in each column as chance would give: nothing repeats with the width of a tensor."""
    rows = signs(KEY)[: COUNT // column * column].view(-1, column)
    deviations = rows.sum(0) / len(rows) ** 0.5
    assert deviations.abs().max() < 5


SEEDS = {
    "consecutive seeds": [mask_key(seed(n), 0) for n in range(8)],
    "seeds either side of zero": [mask_key(seed(n), 3) for n in (-2, -1, 0, 1)],
    "consecutive numbers": [mask_key(seed(77), n) for n in range(-4, 4)],
    "seed and number in turn": [mask_key(seed(n), -n) for n in range(8)],
}


@pytest.mark.parametrize("keys", SEEDS.values(), ids=SEEDS)
def test_masks_of_different_keys_are_independent(keys):
    masks = torch.stack([signs(key) for key in keys])
    for shift in (0, 1, 4):  # a mask must not be its neighbour's, moved along, either
        correlations = masks[:, shift:] @ masks[:, : COUNT - shift].T / COUNT
        others = correlations[~torch.eye(len(keys), dtype=torch.bool)]
        assert others.abs().max() < 0.02, f"moved by {shift}"


def test_the_same_key_gives_the_same_mask():
    first, again = (random_mask(torch.zeros(99), 0.5, mask_key(seed(3), 1)) for _ in range(2))
    assert torch.equal(first, again)


def test_a_mask_needs_no_random_generator():
    state = torch.get_rng_state()
    random_mask(torch.zeros(99), 0.5, mask_key(seed(3), 1))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("number", [0, 1, -1, 10**6, -(10**6), 2**31])
def test_every_number_has_a_key_that_is_a_word(number):
    assert mask_key(seed(5), number).dtype == torch.int32


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 1001])
@pytest.mark.parametrize("key", [0, 1, -1, 2**31 - 1, -(2**31), 123_456_789])
def test_both_ways_to_make_octets_give_the_same_numbers(count, key):
    by_word, by_element = (make(count, seed(key)) for make in (_octets_by_word, _octets_by_element))
    assert torch.equal(by_word, by_element)
    assert by_word.shape == (count,)


def test_octets_take_every_value_alike():
    counts = torch.bincount(_octets_by_element(256 * 1000, KEY), minlength=256)
    assert len(counts) == 256
    assert ((counts - 1000).abs() < 5 * 1000**0.5).all()


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
@pytest.mark.parametrize("octets", [_octets_by_element, _octets_by_word])
def test_rows_of_a_batch_get_the_masks_they_have_in_the_whole_batch(shape, octets, monkeypatch):
    """Two rows for an image in the last shape, as windows are."""
    monkeypatch.setattr("fimaq.quant.masks._octets_by_word", octets)
    whole = random_mask(torch.zeros(shape), 0.5, KEY).unflatten(0, (8, -1))
    positions = torch.tensor([6, 0, 3], dtype=torch.int32)
    few = random_mask(torch.zeros(3 * shape[0] // 8, *shape[1:]), 0.5, KEY, positions).unflatten(0, (3, -1))
    assert torch.equal(few, whole[[6, 0, 3]])
