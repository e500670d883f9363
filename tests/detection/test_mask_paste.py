"""Masks are laid over their boxes as bilinear interpolation at pixel centres says."""

import math

import pytest
import torch
from narrow_detector import regions
from torchvision.models.detection.roi_heads import paste_masks_in_image

from fimaq.detection.detections import Detections, rescale_and_paste
from fimaq.detection.masks import paste_masks

SIZE = (40, 50)


def naive_value(mask: list[list[float]], box: list[float], x: int, y: int) -> float:
    """The mask at the centre of pixel (x, y): its cell centres lie half a cell within the box; zero around it."""
    cells = len(mask)
    u = (x + 0.5 - box[0]) / (box[2] - box[0]) * cells - 0.5
    v = (y + 0.5 - box[1]) / (box[3] - box[1]) * cells - 0.5
    total = 0.0
    for row in (math.floor(v), math.floor(v) + 1):
        for column in (math.floor(u), math.floor(u) + 1):
            if 0 <= row < cells and 0 <= column < cells:
                total += mask[row][column] * (1 - abs(u - column)) * (1 - abs(v - row))
    return total


def test_pasted_masks_are_those_of_the_definition():
    boxes = torch.cat([regions(8, *SIZE), torch.tensor([[-3.5, -7.0, 60.0, 44.0], [10.2, 3.1, 11.0, 39.9]])])
    masks = torch.rand(10, 28, 28, dtype=torch.float64)
    pasted = paste_masks(masks, boxes, SIZE)
    for mask, box, result in zip(masks.tolist(), boxes.tolist(), pasted, strict=True):
        values = torch.tensor([[naive_value(mask, box, x, y) for x in range(SIZE[1])] for y in range(SIZE[0])])
        clear = (values - 0.5).abs() > 1e-4
        assert torch.equal(result[clear], (values >= 0.5)[clear])
        assert clear.float().mean() > 0.99


def test_a_full_mask_fills_its_box_and_no_more():
    pasted = paste_masks(torch.ones(1, 28, 28), torch.tensor([[10.0, 5.0, 30.0, 20.0]]), SIZE)[0]
    expected = torch.zeros(SIZE, dtype=torch.bool)
    expected[5:20, 10:30] = True
    assert torch.equal(pasted, expected)


def test_torchvision_pastes_within_a_pixel():
    boxes = torch.tensor([[4.3, 6.1, 32.8, 35.4], [11.0, 2.0, 45.0, 30.0]])
    distance = (torch.arange(28) - 13.5).square()
    disc = (1 - (distance + distance[:, None]).sqrt() / 20).expand(2, 28, 28)
    ours = paste_masks(disc, boxes, SIZE).float()
    theirs = (paste_masks_in_image(disc[:, None], boxes, SIZE)[:, 0] >= 0.5).float()
    grown, shrunk = (torch.nn.functional.max_pool2d(sign * theirs, 3, 1, 1) * sign for sign in (1, -1))
    assert (ours <= grown).all()
    assert (ours >= shrunk).all()
    assert ours.sum() > 100


@pytest.mark.parametrize("box", [[60.0, 5.0, 70.0, 9.0], [-20.0, 5.0, -10.0, 9.0], [5.0, 60.0, 9.0, 80.0]])
def test_a_box_outside_the_image_leaves_no_mask(box):
    assert not paste_masks(torch.ones(1, 28, 28), torch.tensor([box]), SIZE).any()


def test_a_box_without_extent_is_no_error():
    assert paste_masks(torch.ones(1, 28, 28), torch.tensor([[7.5, 3.0, 7.5, 9.0]]), SIZE).shape == (1, *SIZE)


def test_detections_return_to_the_original_image():
    found = Detections(
        torch.tensor([[10.0, 12.0, 30.0, 24.0]]), torch.ones(1), torch.zeros(1).long(), torch.ones(1, 28, 28)
    )
    original = rescale_and_paste(found, scale_factor=(0.5, 2.0), original_size=(20, 70))
    assert original.boxes.tolist() == [[20, 6, 60, 12]]
    assert original.masks.shape == (1, 20, 70)
    assert original.masks[0, 6:12, 20:60].all()
    assert original.masks.sum() == 6 * 40
