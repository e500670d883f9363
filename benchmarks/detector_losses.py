"""The losses that train a Detector, as MMDetection defines them for Mask R-CNN and Cascade Mask R-CNN.

Everything up to the heads has a fixed shape: objects, proposals and samples are padded and flagged, so that all
images of a batch are handled at once and a GPU seldom waits for the host. Where constants are not MMDetection's
(fewer proposals and samples, anchors for small objects), they suit images of 256 pixels with a few objects.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import roi_align

from fimaq.detection import masks
from fimaq.detection.anchors import STRIDES, grid_anchors
from fimaq.detection.box_head import REGION_SIZE, BoxHead
from fimaq.detection.boxes import decode, encode, with_image_index
from fimaq.detection.detector import Detector
from fimaq.detection.masks import MaskHead
from fimaq.detection.roi import pool_regions
from fimaq.detection.roi_heads import StandardRoIHead
from fimaq.detection.rpn import OVERLAP, in_anchor_order

NOTHING, IGNORED = -1, -2
"""What `assign` gives for a box that shows the background, and for one that is neither that nor an object."""

ANCHOR_OVERLAPS = (0.7, 0.3)  # from which an anchor shows an object, below which it shows the background
ANCHOR_BEST = 0.15  # MMDetection's 0.3 would leave out the shapes of 12 to 17 pixels: the finest anchors have 32
ANCHOR_SAMPLES, ANCHOR_POSITIVES = 256, 0.5
CANDIDATES_PER_LEVEL, PROPOSALS = 400, 400
SUPPRESSION_ROUNDS = 8
REGION_SAMPLES, REGION_POSITIVES = 192, 0.25
MASKS_PER_IMAGE = 32
STAGE_OVERLAPS = (0.5, 0.6, 0.7)
STAGE_WEIGHTS = (1.0, 0.5, 0.25)


class Truth(NamedTuple):
    """The objects of n images, padded to m per image; `present` (n, m) bool tells objects from padding."""

    boxes: Tensor  # (n, m, 4): x1, y1, x2, y2 in pixels
    labels: Tensor  # (n, m) int, from 0
    present: Tensor
    masks: Tensor  # (n, m, height, width) bool


class Regions(NamedTuple):
    """k sampled regions of each of n images, those that show an object first."""

    boxes: Tensor  # (n, k, 4)
    assigned: Tensor  # (n, k): index of the object shown, or NOTHING
    used: Tensor  # (n, k) bool: False where an image had fewer regions to sample
    is_truth: Tensor  # (n, k) bool: an object's own box

    @property
    def positive(self) -> Tensor:
        return self.used & (self.assigned >= 0)


def overlaps(first: Tensor, second: Tensor) -> Tensor:
    """Intersection over union of (..., p, 4) and (..., q, 4) -> (..., p, q); 0 where both boxes are empty."""
    first, second = first.unsqueeze(-2), second.unsqueeze(-3)
    corner = torch.maximum(first[..., :2], second[..., :2])
    shared = (torch.minimum(first[..., 2:], second[..., 2:]) - corner).clamp(min=0).prod(dim=-1)
    areas = [(boxes[..., 2:] - boxes[..., :2]).clamp(min=0).prod(dim=-1) for boxes in (first, second)]
    return shared / (areas[0] + areas[1] - shared).clamp(min=1e-6)


def assign(
    overlap: Tensor, present: Tensor, positive: float, negative: float, best_at_least: float | None = None
) -> Tensor:
    """MMDetection's MaxIoUAssigner: the object of each box, by overlaps (n, m, k) with objects (n, m) -> (n, k).

    A box shows the object that it overlaps most where that is by `positive` or more, NOTHING below `negative`,
    and is IGNORED in between. With `best_at_least`, the boxes that overlap an object most of all, by so much or
    more, show it in any case; the last object has its way where there are several.
    """
    overlap = overlap.masked_fill(~present.unsqueeze(-1), -1)
    most, nearest = overlap.max(dim=1)
    assigned = torch.where(most >= positive, nearest, IGNORED)
    assigned = torch.where(most < negative, NOTHING, assigned)
    if best_at_least is not None:
        best = overlap.amax(dim=2, keepdim=True)
        is_best = (overlap == best) & (best >= best_at_least)
        order = torch.arange(overlap.shape[1], device=overlap.device).view(1, -1, 1)
        last = torch.where(is_best, order, -1).amax(dim=1)
        assigned = torch.where(last >= 0, last, assigned)
    return assigned


def sample(assigned: Tensor, available: Tensor, count: int, share: float) -> tuple[Tensor, Tensor]:
    """Random boxes: at most `share` of them show objects, background fills up what these leave.

    `assigned` and `available` are (n, k); -> indices (n, count), objects first, and whether each is to be used.
    """
    count, objects = (min(most, assigned.shape[1]) for most in (count, int(count * share)))
    noise = torch.rand(assigned.shape, device=assigned.device)
    positive = available & (assigned >= 0)
    ranks = noise.masked_fill(~positive, -1)
    limit = ranks.topk(objects, dim=1).values[:, -1:]
    keys = torch.where(positive & (noise >= limit), 2 + noise, -1)
    keys = torch.where(available & (assigned == NOTHING), noise, keys)
    chosen, indices = keys.topk(count, dim=1)
    return indices, chosen >= 0


def suppress(boxes: Tensor, threshold: float, rounds: int = SUPPRESSION_ROUNDS) -> Tensor:
    """Non-maximum suppression of boxes (n, k, 4), best first: which ones stay, (n, k) bool.

    Each round lets the boxes that stand after the last one suppress again. A box is decided for good after as
    many rounds as the chain of suppressions that leads to it is long: 8 are exact in all but odd cases, and need
    no word from the GPU.
    """
    stronger = (overlaps(boxes, boxes) > threshold).triu(diagonal=1)  # (n, by, of)
    stays = boxes.new_ones(boxes.shape[:2], dtype=torch.bool)
    for _ in range(rounds):
        stays = ~(stronger & stays.unsqueeze(2)).any(dim=1)
    return stays


@torch.no_grad()
def propose(
    logits: Sequence[Tensor], deltas: Sequence[Tensor], anchors: Sequence[Tensor], size: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Proposals (n, k, 4), best first, and which of them are real (n, k), as RPNHead.propose finds them.

    Per level: logits (n, a), deltas (n, a, 4), anchors (a, 4).
    """
    boxes, scores = [], []
    for level_logits, level_deltas, level_anchors in zip(logits, deltas, anchors, strict=True):
        best, order = level_logits.topk(min(CANDIDATES_PER_LEVEL, level_logits.shape[1]), dim=1)
        moves = level_deltas.gather(1, order.unsqueeze(2).expand(-1, -1, 4))
        level_boxes = decode(level_anchors[order].flatten(0, 1), moves.flatten(0, 1), size).view_as(moves)
        stays = suppress(level_boxes, OVERLAP) & (level_boxes[..., 2:] > level_boxes[..., :2]).all(dim=2)
        boxes.append(level_boxes)
        scores.append(best.masked_fill(~stays, -torch.inf))
    every_score = torch.cat(scores, dim=1)
    best, order = every_score.topk(min(PROPOSALS, every_score.shape[1]), dim=1)
    return torch.cat(boxes, dim=1).gather(1, order.unsqueeze(2).expand(-1, -1, 4)), best > -torch.inf


def anchor_losses(logits: Tensor, deltas: Tensor, anchors: Tensor, truth: Truth) -> tuple[Tensor, Tensor]:
    """Of the proposal network: object or not, and where. Logits (n, a), deltas (n, a, 4), anchors (a, 4)."""
    assigned = assign(overlaps(truth.boxes, anchors), truth.present, *ANCHOR_OVERLAPS, ANCHOR_BEST)
    everywhere = torch.ones_like(assigned, dtype=torch.bool)
    indices, used = sample(assigned, everywhere, ANCHOR_SAMPLES, ANCHOR_POSITIVES)
    assigned = assigned.gather(1, indices)
    positive = used & (assigned >= 0)
    total = used.sum().clamp(min=1)
    chosen_logits = logits.gather(1, indices)
    errors = F.binary_cross_entropy_with_logits(chosen_logits, positive.float(), reduction="none")
    image, place = torch.nonzero(positive, as_tuple=True)
    anchor = indices[image, place]
    targets = encode(anchors[anchor], truth.boxes[image, assigned[image, place]])
    return (errors * used).sum() / total, F.l1_loss(deltas[image, anchor], targets, reduction="sum") / total


@torch.no_grad()
def choose_regions(boxes: Tensor, available: Tensor, truth: Truth, overlap: float) -> Regions:
    """Regions to train a head on: from boxes (n, k, 4), of which some are `available` (n, k), and the truth's."""
    is_truth = torch.cat([torch.zeros_like(available), truth.present], dim=1)
    available = torch.cat([available, truth.present], dim=1)
    boxes = torch.cat([boxes, truth.boxes], dim=1)
    # Low-quality matches, which Mask R-CNN asks for here, change nothing: each object's own box is its best.
    assigned = assign(overlaps(truth.boxes, boxes), truth.present, overlap, overlap)
    indices, used = sample(assigned, available, REGION_SAMPLES, REGION_POSITIVES)
    chosen = boxes.gather(1, indices.unsqueeze(2).expand(-1, -1, 4))
    return Regions(chosen, assigned.gather(1, indices), used, is_truth.gather(1, indices))


def region_labels(regions: Regions, truth: Truth, num_classes: int) -> Tensor:
    """(n, k): the class of the object that each region shows, `num_classes` for background."""
    return torch.where(regions.assigned >= 0, truth.labels.gather(1, regions.assigned.clamp(min=0)), num_classes)


def deltas_of_class(head: BoxHead, deltas: Tensor, labels: Tensor) -> Tensor:
    """A head's deltas (k, 4) or (k, 4 * classes), for the classes `labels` (k,): (k, 4)."""
    if head.class_agnostic:
        return deltas
    return deltas.unflatten(1, (-1, 4))[torch.arange(len(labels), device=labels.device), labels]


def box_losses(
    head: BoxHead, features: Sequence[Tensor], regions: Regions, truth: Truth, size: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Of a box head: what regions show, and where exactly; and the regions as the head moves them, (n, k, 4).

    For the next stage a region is moved as its object's class asks for, or the likeliest where it shows none.
    """
    logits, deltas = head(pool_regions(features, with_image_index(list(regions.boxes)), REGION_SIZE))
    logits, deltas = logits.float(), deltas.float()
    background = logits.shape[1] - 1
    labels, used = region_labels(regions, truth, background).flatten(), regions.used.flatten()
    total = used.sum().clamp(min=1)
    classes = (F.cross_entropy(logits, labels, reduction="none") * used).sum() / total
    flat_boxes = regions.boxes.flatten(0, 1)
    image, place = torch.nonzero(regions.positive, as_tuple=True)
    flat = image * regions.boxes.shape[1] + place
    targets = encode(flat_boxes[flat], truth.boxes[image, regions.assigned[image, place]], head.stds)
    moves = deltas_of_class(head, deltas[flat], labels[flat])
    places = F.l1_loss(moves, targets, reduction="sum") / total
    with torch.no_grad():
        likeliest = torch.where(labels < background, labels, logits[:, :-1].argmax(dim=1))
        moved = head.boxes(flat_boxes, deltas_of_class(head, deltas, likeliest), size)
    return classes, places, moved.view_as(regions.boxes)


def mask_targets(regions: Tensor, objects: Tensor, truth_masks: Tensor) -> Tensor:
    """What the masks (o, height, width) of `objects` (k,) show within regions (k, 4): (k, 28, 28), 0 or 1."""
    needed, place = objects.unique(return_inverse=True)
    indexed = torch.cat([place.unsqueeze(1).to(regions), regions], dim=1)
    pixels = truth_masks[needed].unsqueeze(1).to(regions)
    return (roi_align(pixels, indexed, masks.MASK_SIZE, aligned=True).squeeze(1) >= 0.5).float()


def mask_loss(head: MaskHead, features: Sequence[Tensor], regions: Regions, truth: Truth) -> Tensor:
    """Of a mask head: cross entropy per pixel, of the right class's mask alone, in regions that show an object."""
    image, place = torch.nonzero(regions.positive[:, :MASKS_PER_IMAGE], as_tuple=True)
    boxes, shown = regions.boxes[image, place], regions.assigned[image, place]
    indexed = torch.cat([image.unsqueeze(1).to(boxes), boxes], dim=1)
    logits = head(pool_regions(features, indexed, masks.REGION_SIZE)).float()
    logits = logits[torch.arange(len(image), device=image.device), truth.labels[image, shown]]
    targets = mask_targets(boxes, image * truth.boxes.shape[1] + shown, truth.masks.flatten(0, 1))
    errors = F.binary_cross_entropy_with_logits(logits, targets, reduction="sum")
    return errors / max(1, targets.numel())


def detector_losses(detector: Detector, images: Tensor, truth: Truth) -> dict[str, Tensor]:
    """All losses for normalised images (n, 3, height, width), by name and weighted, to be added up.

    The modules are called one by one since a Detector's own forward pass has no gradient.
    """
    size = (images.shape[2], images.shape[3])
    features = detector.neck(detector.backbone(images))
    maps = detector.rpn_head(features)
    logits = [in_anchor_order(level, 1).squeeze(2).float() for level in maps[0]]
    deltas = [in_anchor_order(level, 4).float() for level in maps[1]]
    anchors = [
        grid_anchors(level.shape[2], level.shape[3], stride, level.device)
        for level, stride in zip(features, STRIDES, strict=True)
    ]
    every_anchor = torch.cat(logits, dim=1), torch.cat(deltas, dim=1), torch.cat(anchors)
    losses = dict(zip(("rpn class", "rpn box"), anchor_losses(*every_anchor, truth), strict=True))

    head = detector.roi_head
    single = isinstance(head, StandardRoIHead)
    box_heads, mask_heads = ([heads] if single else list(heads) for heads in (head.bbox_head, head.mask_head))
    boxes, available = propose(logits, deltas, anchors, size)
    for stage, (box_head, mask_head) in enumerate(zip(box_heads, mask_heads, strict=True)):
        regions = choose_regions(boxes, available, truth, STAGE_OVERLAPS[stage])
        classes, places, boxes = box_losses(box_head, features, regions, truth, size)
        mask = mask_loss(mask_head, features, regions, truth)
        for name, loss in (("class", classes), ("box", places), ("mask", mask)):
            key = name if single else f"{name} {stage + 1}"
            losses[key] = STAGE_WEIGHTS[stage] * loss
        available = regions.used & ~regions.is_truth  # each stage is given the truth's own boxes anew
    return losses
