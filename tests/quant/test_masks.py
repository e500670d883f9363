"""QDrop's masks: the right share of true values, independent of each other, for any shape."""

import pytest
import torch

from fimaq.quant.fake import random_mask


@pytest.mark.parametrize("shape", [(), (1,), (7,), (8,), (9,), (3, 5, 7), (2, 3, 4, 0)])
def test_a_mask_has_the_shape_of_its_tensor(shape):
    mask = random_mask(torch.zeros(shape), 0.5)
    assert mask.shape == shape
    assert mask.dtype == torch.bool


@pytest.mark.parametrize("probability", [0.1, 0.25, 0.5, 0.9])
def test_a_mask_is_true_as_often_as_asked(probability):
    mask = random_mask(torch.zeros(333, 301), probability)
    assert mask.double().mean().item() == pytest.approx(probability, abs=0.008)


def test_a_probability_of_zero_drops_nothing():
    assert not random_mask(torch.zeros(1001), 0.0).any()


@pytest.mark.parametrize("probability", [0.999, 1.0])
def test_a_probability_of_one_drops_everything(probability):
    assert random_mask(torch.zeros(1001), probability).double().mean() > 0.99


def test_neighbours_in_a_mask_are_independent():
    mask = random_mask(torch.zeros(100_000), 0.5).double() - 0.5
    for distance in range(1, 10):
        correlation = 4 * (mask[distance:] * mask[:-distance]).mean()
        assert abs(correlation) < 0.02, f"at distance {distance}"


def test_masks_follow_the_seed():
    torch.manual_seed(3)
    first, second = random_mask(torch.zeros(99), 0.5), random_mask(torch.zeros(99), 0.5)
    torch.manual_seed(3)
    assert torch.equal(random_mask(torch.zeros(99), 0.5), first)
    assert not torch.equal(first, second)
