"""Features of regions: each region is read from the pyramid level that suits its size."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torchvision.ops import roi_align

from fimaq.detection.anchors import STRIDES

REGION_STRIDES = STRIDES[:4]  # the coarsest level serves proposals only
FINEST_SIZE = 56  # regions of less than twice this side (in pixels) are read from the finest level


def assign_levels(boxes: Tensor, levels: int) -> Tensor:
    """The pyramid level of each box by the root of its area: (k, 4) -> (k,) int, 0 (finest) to levels - 1."""
    widths, heights = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    side = (widths * heights).sqrt()
    return torch.log2(side / FINEST_SIZE + 1e-6).floor().clamp(0, levels - 1).long()


def pool_regions(features: Sequence[Tensor], regions: Tensor, output_size: int) -> Tensor:
    """RoIAlign of regions (k, 5: image index, x1, y1, x2, y2) -> (k, channels, output_size, output_size).

    `features` are maps (n, channels, h_i, w_i) of strides 4, 8, 16, 32, and possibly more that are not read.
    """
    used = features[: len(REGION_STRIDES)]
    pooled = used[0].new_zeros(len(regions), used[0].shape[1], output_size, output_size)
    levels = assign_levels(regions[:, 1:], len(used))
    for level, (feature, stride) in enumerate(zip(used, REGION_STRIDES, strict=True)):
        chosen = torch.nonzero(levels == level).flatten()
        if len(chosen):
            pooled[chosen] = roi_align(
                feature, regions[chosen], output_size, spatial_scale=1 / stride, sampling_ratio=0, aligned=True
            )
    return pooled
