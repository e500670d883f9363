"""Anchors lie where MMDetection lays them, in its order."""

import math

import pytest

from fimaq.detection.anchors import base_anchors, grid_anchors


@pytest.mark.parametrize("stride", [4, 8, 64])
def test_each_anchor_of_a_grid(stride):
    anchors = grid_anchors(3, 2, stride).tolist()
    expected = []
    for y in range(3):
        for x in range(2):
            for ratio in (0.5, 1.0, 2.0):
                area = (8 * stride) ** 2
                width = math.sqrt(area / ratio)
                height = width * ratio
                centre_x, centre_y = x * stride, y * stride
                expected.append(
                    [centre_x - width / 2, centre_y - height / 2, centre_x + width / 2, centre_y + height / 2]
                )
    assert len(anchors) == len(expected)
    for anchor, values in zip(anchors, expected, strict=True):
        assert anchor == pytest.approx(values, rel=1e-6, abs=1e-4)


def test_the_square_anchor_of_stride_4():
    assert base_anchors(4)[1].tolist() == [-16, -16, 16, 16]
