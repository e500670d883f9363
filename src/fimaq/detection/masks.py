"""Masks: a small map of probabilities per detection, and its place in the image."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fimaq.detection.conv import ConvLayer

REGION_SIZE = 14
MASK_SIZE = 2 * REGION_SIZE
THRESHOLD = 0.5


class MaskHead(nn.Module):
    """MMDetection's FCNMaskHead: pooled regions (k, channels, 14, 14) -> logits (k, classes, 28, 28)."""

    def __init__(self, num_classes: int, channels: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(ConvLayer(channels, channels, 3, activated=True) for _ in range(4))
        self.upsample = nn.ConvTranspose2d(channels, channels, 2, stride=2)
        self.conv_logits = nn.Conv2d(channels, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x)
        return self.conv_logits(self.upsample(x).relu())

    def probabilities(self, x: Tensor, labels: Tensor) -> Tensor:
        """The masks of the detected classes only: labels (k,) -> (k, 28, 28)."""
        return self(x)[torch.arange(len(labels), device=labels.device), labels].sigmoid()


def paste_masks(masks: Tensor, boxes: Tensor, image_size: tuple[int, int]) -> Tensor:
    """Probabilities (k, m, m) stretched over boxes (k, 4) of an image (height, width) -> (k, height, width) bool.

    A pixel belongs to the mask where the probability, bilinearly interpolated at the pixel's centre and zero
    around the mask, is at least one half. Only a box and the pixel around it are computed, one mask at a time:
    farther out a mask counts for less than one half. So memory is bounded by one float map of the image's size.
    """
    height, width = image_size
    pasted = torch.zeros(len(masks), height, width, dtype=torch.bool, device=masks.device)
    for index, (left, top, right, bottom) in enumerate(boxes.tolist()):
        columns = slice(max(math.floor(left) - 1, 0), max(min(math.ceil(right) + 1, width), 0))
        rows = slice(max(math.floor(top) - 1, 0), max(min(math.ceil(bottom) + 1, height), 0))
        if columns.start >= columns.stop or rows.start >= rows.stop:
            continue
        box = boxes[index].float()
        x = _grid_coordinates(columns, box[0], box[2])
        y = _grid_coordinates(rows, box[1], box[3])
        grid = torch.stack([x.expand(len(y), -1), y[:, None].expand(-1, len(x))], dim=-1)
        values = F.grid_sample(masks[index].float()[None, None], grid[None], align_corners=False)
        pasted[index, rows, columns] = values[0, 0] >= THRESHOLD
    return pasted


def _grid_coordinates(pixels: slice, start: Tensor, end: Tensor) -> Tensor:
    """Pixel centres from -1 at the `start` of a box to 1 at its `end`; of a box without extent, its middle."""
    centres = torch.arange(pixels.start, pixels.stop, device=start.device, dtype=start.dtype) + 0.5
    return ((centres - start) / (end - start) * 2 - 1).nan_to_num(0, 0, 0)
