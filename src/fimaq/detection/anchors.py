"""Anchors: the boxes that the region proposal network starts from, as MMDetection's AnchorGenerator lays them."""

import torch
from torch import Tensor

STRIDES = (4, 8, 16, 32, 64)
RATIOS = (0.5, 1.0, 2.0)  # height / width
SCALE = 8  # side of a square anchor in strides


def base_anchors(stride: int) -> Tensor:
    """The anchors of position (0, 0): (ratios, 4), all of one area and centred on the origin."""
    ratios = torch.tensor(RATIOS)
    heights = SCALE * stride * ratios.sqrt()
    widths = SCALE * stride * (1 / ratios.sqrt())
    return torch.stack([-widths, -heights, widths, heights], dim=1) / 2


def grid_anchors(height: int, width: int, stride: int, device: torch.device | None = None) -> Tensor:
    """All anchors of a feature map: (height * width * ratios, 4); ratios change fastest, then x, then y."""
    y = torch.arange(height, device=device) * stride
    x = torch.arange(width, device=device) * stride
    rows, columns = torch.meshgrid(y, x, indexing="ij")
    shifts = torch.stack([columns, rows, columns, rows], dim=-1).reshape(-1, 1, 4)
    return (shifts + base_anchors(stride).to(shifts.device)).reshape(-1, 4)
