"""Non-maximum suppression within groups of boxes, and the choice of an image's detections by it."""

import torch
from torch import Tensor
from torchvision.ops import nms

SPLIT_FROM = 10_000  # as many boxes are suppressed group by group, so that no quadratic table of all is needed


def grouped_nms(boxes: Tensor, scores: Tensor, groups: Tensor, threshold: float) -> Tensor:
    """Indices of the boxes that no better one of their own group overlaps by more than `threshold`, best first.

    Boxes (n, 4), scores (n,), groups (n,) int. As in mmcv, groups are told apart by moving each to a place of its
    own, although that costs float32 boxes some of their precision: published scores were found so.
    """
    if not len(boxes):
        return groups.new_zeros(0)
    if len(boxes) < SPLIT_FROM:
        apart = boxes + (groups.to(boxes) * (boxes.max() + 1))[:, None]
        return nms(apart, scores, threshold)
    members = [torch.nonzero(groups == group).flatten() for group in groups.unique()]
    kept = torch.cat([m[nms(boxes[m], scores[m], threshold)] for m in members]).sort().values
    return kept[scores[kept].sort(descending=True, stable=True).indices]


def choose_detections(
    boxes: Tensor, scores: Tensor, least_score: float, threshold: float, most: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The detections of one image, best first: boxes (k, 4), scores (k,) and labels (k,), k <= `most`.

    `boxes` is (n, 4 * classes), or (n, 4) where all classes share them; `scores` is (n, classes + 1) with the
    background last. A region may be detected as several classes.
    """
    classes = scores.shape[1] - 1
    per_class = boxes.unflatten(1, (-1, 4)).expand(-1, classes, 4)
    region, label = torch.nonzero(scores[:, :classes] > least_score, as_tuple=True)
    boxes, scores = per_class[region, label], scores[region, label]
    kept = grouped_nms(boxes, scores, label, threshold)[:most]
    return boxes[kept], scores[kept], label[kept]
