"""Regions are read from the level of their size, at the right place."""

import pytest
import torch
from narrow_detector import regions
from torchvision.ops.poolers import LevelMapper

from fimaq.detection.roi import assign_levels, pool_regions


@pytest.mark.parametrize(
    ("side", "level"),
    [(0, 0), (55.9, 0), (56, 0), (111.99, 0), (112, 1), (223.9, 1), (224, 2), (447.9, 2), (448, 3), (5000, 3)],
)
def test_the_level_at_the_borders(side, level):
    assert assign_levels(torch.tensor([[3.0, 5.0, 3 + side, 5 + side]]), 4).tolist() == [level]


def test_a_long_box_counts_by_its_area():
    assert assign_levels(torch.tensor([[0.0, 0.0, 448.0, 28.0]]), 4).tolist() == [1]


def test_torchvision_assigns_the_same_levels():
    boxes = regions(500, 900, 1300)
    theirs = LevelMapper(2, 5)([boxes])
    assert assign_levels(boxes, 4).tolist() == theirs.tolist()
    assert set(theirs.tolist()) == {0, 1, 2, 3}


def test_pooling_a_map_of_positions_gives_the_middle_of_each_bin():
    """RoIAlign is exact where the map is linear, as long as no sample lies beyond the outermost pixel centres."""
    features = []
    for level, stride in enumerate((4, 8, 16, 32, 64)):
        x = (torch.arange(1600 // stride, dtype=torch.float64) + 0.5) * stride
        rows, columns = torch.meshgrid(x, x, indexing="ij")
        maps = torch.stack([columns, rows, torch.full_like(rows, level)])
        features.append(torch.stack([maps, maps + 10_000]))
    boxes = regions(30, 1400, 1400) + 60
    image = torch.arange(30).double() % 2
    pooled = pool_regions(features, torch.cat([image[:, None], boxes], dim=1), 7)
    middle = (torch.arange(7) + 0.5) / 7
    x = boxes[:, 0, None] + middle * (boxes[:, 2] - boxes[:, 0])[:, None] + 10_000 * image[:, None]
    y = boxes[:, 1, None] + middle * (boxes[:, 3] - boxes[:, 1])[:, None] + 10_000 * image[:, None]
    torch.testing.assert_close(pooled[:, 0], x[:, None, :].expand(-1, 7, -1))
    torch.testing.assert_close(pooled[:, 1], y[:, :, None].expand(-1, -1, 7))
    level = assign_levels(boxes, 4) + 10_000 * image
    torch.testing.assert_close(pooled[:, 2], level[:, None, None].expand(-1, 7, 7))


def test_no_regions_pool_to_nothing():
    features = [torch.zeros(1, 5, 8, 8)] * 5
    assert pool_regions(features, torch.zeros(0, 5), 14).shape == (0, 5, 14, 14)
