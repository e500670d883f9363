"""Suppression within groups, against the definition of it; and what is left as detections."""

import pytest
import torch
from narrow_detector import regions
from torch import Tensor

from fimaq.detection import nms
from fimaq.detection.nms import choose_detections, grouped_nms


def overlap(a: list[float], b: list[float]) -> float:
    width = max(min(a[2], b[2]) - max(a[0], b[0]), 0)
    height = max(min(a[3], b[3]) - max(a[1], b[1]), 0)
    both = width * height
    return both / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both)


def naive_nms(boxes: Tensor, scores: Tensor, groups: Tensor, threshold: float) -> list[int]:
    kept: list[int] = []
    for index in sorted(range(len(boxes)), key=lambda i: -scores[i].item()):
        rivals = [k for k in kept if groups[k] == groups[index]]
        if all(overlap(boxes[k].tolist(), boxes[index].tolist()) <= threshold for k in rivals):
            kept.append(index)
    return kept


@pytest.mark.parametrize("split_from", [10_000, 1])
def test_suppression_is_that_of_the_definition(monkeypatch, split_from):
    monkeypatch.setattr(nms, "SPLIT_FROM", split_from)
    boxes, scores, groups = regions(120, 50, 60), torch.rand(120).double(), torch.randint(0, 3, (120,))
    kept = grouped_nms(boxes, scores, groups, 0.3).tolist()
    assert kept == naive_nms(boxes, scores, groups, 0.3)
    assert 5 < len(kept) < 100


def test_nothing_is_left_of_nothing():
    assert len(grouped_nms(torch.zeros(0, 4), torch.zeros(0), torch.zeros(0, dtype=torch.long), 0.5)) == 0


@pytest.mark.parametrize("classes_share_boxes", [False, True])
def test_detections_are_the_best_of_all_classes_above_the_least_score(classes_share_boxes):
    scores = torch.randn(40, 4, dtype=torch.float64).mul(2).softmax(dim=1)
    boxes = regions(40, 50, 60) if classes_share_boxes else regions(120, 50, 60).view(40, 12)
    found, found_scores, labels = choose_detections(boxes, scores, 0.2, 0.5, 15)
    candidates = [
        (score, label, (boxes[n] if classes_share_boxes else boxes[n, 4 * label : 4 * label + 4]))
        for n in range(40)
        for label, score in enumerate(scores[n, :3].tolist())
        if score > 0.2
    ]
    flat = torch.stack([box for _, _, box in candidates])
    flat_scores = torch.tensor([score for score, _, _ in candidates], dtype=torch.float64)
    flat_labels = torch.tensor([label for _, label, _ in candidates])
    kept = naive_nms(flat, flat_scores, flat_labels, 0.5)[:15]
    assert len(kept) == 15
    torch.testing.assert_close(found, flat[kept])
    torch.testing.assert_close(found_scores, flat_scores[kept])
    assert labels.tolist() == flat_labels[kept].tolist()


def test_no_score_above_the_least_gives_no_detections():
    boxes, scores, labels = choose_detections(torch.ones(5, 12), torch.zeros(5, 4), 0.05, 0.5, 100)
    assert (boxes.shape, scores.shape, labels.shape) == ((0, 4), (0,), (0,))
