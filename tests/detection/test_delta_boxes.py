"""Boxes and deltas are each other's inverse, and follow MMDetection's formulas."""

import math

import pytest
import torch
from torchvision.models.detection._utils import BoxCoder

from fimaq.detection.boxes import decode, encode, with_image_index

STDS = (0.1, 0.1, 0.2, 0.2)
BOX = [10.0, 20.0, 50.0, 100.0]


def test_decoding_follows_the_formula_for_each_class():
    deltas = torch.tensor([[0.5, -1.0, 2.0, -0.5, 0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    decoded = decode(torch.tensor([BOX], dtype=torch.float64), deltas, stds=STDS)[0].tolist()
    centre_x, centre_y = 30 + 40 * 0.05, 60 - 80 * 0.1
    width, height = 40 * math.exp(0.4), 80 * math.exp(-0.1)
    first = [centre_x - width / 2, centre_y - height / 2, centre_x + width / 2, centre_y + height / 2]
    assert decoded == pytest.approx([*first, *BOX], abs=1e-12)


def test_decoding_undoes_encoding():
    boxes = torch.tensor([BOX, [0.0, 0.0, 7.0, 3.0]], dtype=torch.float64)
    targets = torch.tensor([[5.0, 30.0, 44.0, 77.0], [1.0, -2.0, 9.0, 5.0]], dtype=torch.float64)
    means = (0.1, 0.2, -0.1, 0.3)
    deltas = encode(boxes, targets, STDS, means)
    torch.testing.assert_close(decode(boxes, deltas, stds=STDS, means=means), targets)
    assert deltas[0, 0].item() == pytest.approx(((24.5 - 30) / 40 - 0.1) / 0.1)


def test_a_box_grows_and_shrinks_by_at_most_1000_to_16():
    deltas = torch.tensor([[0.0, 0.0, 50.0, -50.0]], dtype=torch.float64)
    left, top, right, bottom = decode(torch.tensor([BOX], dtype=torch.float64), deltas)[0].tolist()
    assert right - left == pytest.approx(40 * 62.5)
    assert bottom - top == pytest.approx(80 / 62.5)


def test_boxes_are_cut_off_at_the_borders_of_the_image():
    deltas = torch.tensor([[-1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]])
    decoded = decode(torch.tensor([BOX, BOX]), deltas, image_size=(90, 60))
    assert decoded.tolist() == [[0, 20, 10, 90], [50, 90, 60, 90]]


def test_torchvision_decodes_the_same_within_its_own_limit():
    generator = torch.Generator().manual_seed(0)
    boxes = torch.tensor([BOX] * 20, dtype=torch.float64) + torch.arange(20)[:, None]
    deltas = torch.randn(20, 12, generator=generator, dtype=torch.float64)
    theirs = BoxCoder((10.0, 10.0, 5.0, 5.0)).decode(deltas, [boxes])
    torch.testing.assert_close(decode(boxes, deltas, stds=STDS), theirs.flatten(1))


def test_no_boxes_decode_to_no_boxes():
    assert decode(torch.zeros(0, 4), torch.zeros(0, 12), (5, 5)).shape == (0, 12)


def test_regions_of_all_images_carry_their_image():
    regions = with_image_index([torch.ones(2, 4), torch.zeros(0, 4), torch.full((1, 4), 7.0)])
    assert regions.tolist() == [[0, 1, 1, 1, 1], [0, 1, 1, 1, 1], [2, 7, 7, 7, 7]]
