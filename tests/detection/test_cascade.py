"""Three stages: each refines the boxes of the one before, all decide on class and mask together."""

import pytest
import torch
from narrow_detector import CLASSES, narrow_detector, regions

from fimaq.detection.boxes import decode
from fimaq.detection.roi import pool_regions
from fimaq.detection.roi_heads import boxes_and_scores, mask_probabilities, stages

STDS = ((0.1, 0.1, 0.2, 0.2), (0.05, 0.05, 0.1, 0.1), (0.033, 0.033, 0.067, 0.067))
SIZE = (90, 120)


@pytest.fixture
def features():
    return [torch.randn(1, 16, 96 // s, 128 // s, dtype=torch.float64) for s in (4, 8, 16, 32, 64)]


def pooled(features, boxes, size):
    return pool_regions(features, torch.cat([boxes.new_zeros(len(boxes), 1), boxes], dim=1), size)


@pytest.mark.parametrize("box_head", ["shared2fc", "4conv1fc"])
@torch.no_grad()
def test_boxes_are_refined_in_turn_and_logits_averaged(features, box_head):
    heads = narrow_detector("cascade_mask_rcnn_swin_t", box_head=box_head).roi_head.bbox_head
    proposals = boxes = regions(9, *SIZE)
    all_logits = []
    for head, stds in zip(heads, STDS, strict=True):
        logits, deltas = head(pooled(features, boxes, 7))
        all_logits.append(logits)
        given = boxes
        if box_head == "shared2fc":
            assert deltas.shape == (9, 4)
            boxes = decode(given, deltas, SIZE, stds)
        else:
            assert deltas.shape == (9, 4 * CLASSES)
            label = [int(row[:CLASSES].argmax()) for row in logits]
            own = torch.stack([deltas[i, 4 * k : 4 * k + 4] for i, k in enumerate(label)])
            boxes = decode(given, own, SIZE, stds)
    (found,), (scores,) = boxes_and_scores(stages(list(heads), features, [proposals], [SIZE]), [SIZE])
    torch.testing.assert_close(found, decode(given, deltas, SIZE, STDS[2]))
    mean_of_logits = (all_logits[0] + all_logits[1] + all_logits[2]) / 3
    torch.testing.assert_close(scores, mean_of_logits.softmax(dim=1))
    mean_of_scores = sum(logits.softmax(dim=1) for logits in all_logits) / 3
    assert (scores - mean_of_scores).abs().max() > 1e-3


@torch.no_grad()
def test_masks_are_the_mean_probability_of_the_detected_class(features):
    heads = narrow_detector("cascade_mask_rcnn_swin_t").roi_head.mask_head
    boxes, labels = regions(4, *SIZE), torch.tensor([0, 2, 1, 2])
    found = mask_probabilities(list(heads), features, torch.cat([boxes.new_zeros(4, 1), boxes], dim=1), labels)
    each = [head(pooled(features, boxes, 14)).sigmoid() for head in heads]
    expected = torch.stack([sum(stage[i, label] for stage in each) / 3 for i, label in enumerate(labels)])
    torch.testing.assert_close(found, expected)
    assert found.shape == (4, 28, 28)


@pytest.mark.parametrize("name", ["mask_rcnn_swin_t", "cascade_mask_rcnn_swin_t"])
@pytest.mark.parametrize("counts", [(0,), (0, 7), (7, 0, 7), (0, 0)])
@torch.no_grad()
def test_images_without_proposals_have_no_detections(features, name, counts):
    maps = [level.expand(len(counts), -1, -1, -1) for level in features]
    detector = narrow_detector(name)
    with detector.every_region_counts():
        found = detector.roi_head(maps, [regions(9, *SIZE)[:count] for count in counts], [SIZE] * len(counts))
    for detections, count in zip(found, counts, strict=True):
        assert (len(detections) > 0) == (count > 0)
        assert detections.masks.shape == (len(detections), 28, 28)
