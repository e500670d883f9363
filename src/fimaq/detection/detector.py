"""The whole detector: backbone, feature pyramid, proposals, detections."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fimaq.detection.detections import Detections
from fimaq.detection.fpn import FPN
from fimaq.detection.roi_heads import CascadeRoIHead, StandardRoIHead
from fimaq.detection.rpn import RPNHead
from fimaq.detection.swin import SwinBackbone


class Detector(nn.Module):
    """Mask R-CNN or Cascade Mask R-CNN, by its `roi_head`. Its images are normalised, and padded bottom right."""

    def __init__(
        self, backbone: SwinBackbone, neck: FPN, rpn_head: RPNHead, roi_head: StandardRoIHead | CascadeRoIHead
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.neck = neck
        self.rpn_head = rpn_head
        self.roi_head = roi_head
        self.num_classes = roi_head.num_classes

    @torch.no_grad()
    def forward(self, images: Tensor, sizes: Sequence[tuple[int, int]]) -> list[Detections]:
        """Images (n, 3, H, W) and their (height, width) without padding -> detections in pixels of `images`."""
        features = self.neck(self.backbone(images))
        proposals = self.rpn_head.propose(features, sizes)
        found: list[Detections] = self.roi_head(features, proposals, sizes)
        return found

    @contextmanager
    def every_region_counts(self) -> Iterator[None]:
        """Detections whatever their score, so that all heads have regions to look at, also in an empty image."""
        least_score = self.roi_head.least_score
        self.roi_head.least_score = 0.0
        try:
            yield
        finally:
            self.roi_head.least_score = least_score
