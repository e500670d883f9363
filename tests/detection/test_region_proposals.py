"""Proposals: the best per level, clipped, suppressed within their level, best first."""

import pytest
import torch
from narrow_detector import narrow_detector
from test_box_suppression import naive_nms

from fimaq.detection import rpn
from fimaq.detection.anchors import STRIDES, grid_anchors
from fimaq.detection.boxes import decode
from fimaq.detection.rpn import select_proposals

SHAPES = [(16, 12), (8, 6), (4, 3), (2, 2), (1, 1)]


@pytest.fixture
def levels():
    generator = torch.Generator().manual_seed(0)
    anchors = [grid_anchors(*shape, stride).double() for shape, stride in zip(SHAPES, STRIDES, strict=True)]
    logits = [torch.randn(len(a), generator=generator, dtype=torch.float64) for a in anchors]
    deltas = [torch.randn(len(a), 4, generator=generator, dtype=torch.float64) for a in anchors]
    return logits, deltas, anchors


def test_proposals_are_those_of_the_definition(levels, monkeypatch):
    monkeypatch.setattr(rpn, "CANDIDATES_PER_LEVEL", 50)
    monkeypatch.setattr(rpn, "PROPOSALS", 40)
    boxes, scores, level_of = [], [], []
    for level, (logits, deltas, anchors) in enumerate(zip(*levels, strict=True)):
        for index in sorted(range(len(logits)), key=lambda i: -logits[i].item())[:50]:
            box = decode(anchors[index : index + 1], deltas[index : index + 1], (61, 45))[0]
            if box[2] > box[0] and box[3] > box[1]:
                boxes.append(box)
                scores.append(logits[index].sigmoid())
                level_of.append(level)
    every = torch.stack(boxes), torch.stack(scores), torch.tensor(level_of)
    kept = naive_nms(*every, 0.7)[:40]
    proposals, proposal_scores = select_proposals(*levels, (61, 45))
    assert len(kept) == 40
    torch.testing.assert_close(proposals, every[0][kept])
    torch.testing.assert_close(proposal_scores, every[1][kept])


def test_boxes_outside_the_image_are_no_proposals(levels):
    logits, deltas, anchors = levels
    away = [torch.tensor([1000.0, 0, 0, 0]).double().expand_as(d) for d in deltas]
    proposals, scores = select_proposals(logits, away, anchors, (61, 45))
    assert (proposals.shape, scores.shape) == ((0, 4), (0,))


def test_a_head_and_its_anchors_agree_on_their_order():
    head = narrow_detector().rpn_head
    features = [torch.randn(2, 16, h, w, dtype=torch.float64) for h, w in SHAPES]
    logits, deltas = head(features)
    position, ratio = (9, 5), 2
    for level in logits:
        level.fill_(-20.0)
    logits[0][1, ratio, position[0], position[1]] = 20.0
    deltas[0][1, 4 * ratio : 4 * ratio + 4, position[0], position[1]] = torch.tensor([0.1, 0, 0, 0]).double()
    head.forward = lambda _: (logits, deltas)
    first = head.propose(features, [(1000, 1000)] * 2)[1][0]
    width, height = 32 / 2**0.5, 32 * 2**0.5
    centre_x, centre_y = 5 * 4 + 0.1 * width, 9 * 4
    expected = [centre_x - width / 2, centre_y - height / 2, centre_x + width / 2, centre_y + height / 2]
    assert first.tolist() == pytest.approx(expected, abs=1e-4)
