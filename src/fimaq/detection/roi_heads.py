"""From proposals to detections: one round (Mask R-CNN) or three that refine each other's boxes (Cascade)."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fimaq.detection import masks
from fimaq.detection.box_head import REGION_SIZE, BoxHead
from fimaq.detection.boxes import Numbers4, with_image_index
from fimaq.detection.detections import Detections
from fimaq.detection.masks import MaskHead
from fimaq.detection.nms import choose_detections
from fimaq.detection.roi import pool_regions

LEAST_SCORE = 0.05
OVERLAP = 0.5
DETECTIONS = 100
STAGE_STDS: tuple[Numbers4, ...] = (
    (0.1, 0.1, 0.2, 0.2),
    (0.05, 0.05, 0.1, 0.1),
    (0.033, 0.033, 0.067, 0.067),
)

Sizes = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class HeadShape:
    """What the box and mask heads of a detector are made of."""

    box_head: str
    num_classes: int
    channels: int
    fc_channels: int
    class_agnostic: bool

    def heads_for(self, stds: Numbers4) -> tuple[BoxHead, MaskHead]:
        sizes = (self.num_classes, self.channels, self.fc_channels)
        return BoxHead(self.box_head, *sizes, stds, self.class_agnostic), MaskHead(self.num_classes, self.channels)


class StandardRoIHead(nn.Module):
    """One box head and one mask head."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.num_classes, self.least_score = shape.num_classes, LEAST_SCORE
        self.bbox_head, self.mask_head = shape.heads_for(STAGE_STDS[0])

    @property
    def heads(self) -> tuple[list[BoxHead], list[MaskHead]]:
        return [self.bbox_head], [self.mask_head]

    def forward(self, features: Sequence[Tensor], proposals: list[Tensor], sizes: Sizes) -> list[Detections]:
        """Pyramid maps (n, channels, h_i, w_i) and per image proposals (k, 4) -> detections per image."""
        return detect_in_stages(*self.heads, features, proposals, sizes, self.least_score)


class CascadeRoIHead(nn.Module):
    """Three box heads in a row and three mask heads side by side."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.num_classes, self.least_score = shape.num_classes, LEAST_SCORE
        stages = [shape.heads_for(stds) for stds in STAGE_STDS]
        self.bbox_head = nn.ModuleList(box_head for box_head, _ in stages)
        self.mask_head = nn.ModuleList(mask_head for _, mask_head in stages)

    @property
    def heads(self) -> tuple[list[BoxHead], list[MaskHead]]:
        box_heads = [head for head in self.bbox_head if isinstance(head, BoxHead)]
        return box_heads, [head for head in self.mask_head if isinstance(head, MaskHead)]

    def forward(self, features: Sequence[Tensor], proposals: list[Tensor], sizes: Sizes) -> list[Detections]:
        """As in StandardRoIHead."""
        return detect_in_stages(*self.heads, features, proposals, sizes, self.least_score)


def detect_in_stages(
    box_heads: Sequence[BoxHead],
    mask_heads: Sequence[MaskHead],
    features: Sequence[Tensor],
    proposals: list[Tensor],
    sizes: Sizes,
    least_score: float,
) -> list[Detections]:
    """Detections of each image: boxes of the last stage, classes and masks of all stages together."""
    boxes, scores = boxes_and_scores(stages(box_heads, features, proposals, sizes), sizes)
    chosen = [
        choose_detections(b, s, least_score, OVERLAP, DETECTIONS) for b, s in zip(boxes, scores, strict=True)
    ]
    counts = [len(labels) for _, _, labels in chosen]
    regions = with_image_index([kept for kept, _, _ in chosen])
    labels = torch.cat([kept for _, _, kept in chosen])
    probabilities = mask_probabilities(mask_heads, features, regions, labels).split(counts)
    return [Detections(*kept, masks=mask) for kept, mask in zip(chosen, probabilities, strict=True)]


@dataclass(frozen=True)
class Stage:
    """A box head, and per image the proposals (k, 4) it looks at, its logits (k, classes + 1) and its deltas."""

    head: BoxHead
    proposals: list[Tensor]
    logits: tuple[Tensor, ...]
    deltas: tuple[Tensor, ...]


def stages(
    heads: Sequence[BoxHead], features: Sequence[Tensor], proposals: list[Tensor], sizes: Sizes
) -> Iterator[Stage]:
    """Each head looks at the boxes that the one before it has moved."""
    counts = [len(p) for p in proposals]
    for head in heads:
        pooled = pool_regions(features, with_image_index(proposals), REGION_SIZE)
        logits, deltas = (output.split(counts) for output in head(pooled))
        yield Stage(head, proposals, logits, deltas)
        if head is not heads[-1]:
            proposals = [head.refined(*given) for given in zip(proposals, logits, deltas, sizes, strict=True)]


def boxes_and_scores(stages: Iterable[Stage], sizes: Sizes) -> tuple[list[Tensor], list[Tensor]]:
    """Per image: boxes (k, 4) or (k, 4 * classes) of the last head, and scores (k, classes + 1).

    The scores are the softmax of the logits' mean over the stages, not the mean of softmaxes.
    """
    passed = list(stages)
    last = passed[-1]
    logits = zip(*(stage.logits for stage in passed), strict=True)
    scores = [(torch.stack(of_image).sum(0) / len(passed)).softmax(dim=1) for of_image in logits]
    boxes = [last.head.boxes(*given) for given in zip(last.proposals, last.deltas, sizes, strict=True)]
    return boxes, scores


def mask_probabilities(
    heads: Sequence[MaskHead], features: Sequence[Tensor], regions: Tensor, labels: Tensor
) -> Tensor:
    """Masks of regions (k, 5) for their labels (k,), the mean of the heads' probabilities: (k, 28, 28)."""
    if not len(regions):
        return regions.new_zeros(0, masks.MASK_SIZE, masks.MASK_SIZE)
    pooled = pool_regions(features, regions, masks.REGION_SIZE)
    return torch.stack([head.probabilities(pooled, labels) for head in heads]).mean(dim=0)
