"""The losses that the detection benchmark trains with, on cases small enough to work out by hand."""

import math
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from benchmark_scripts import benchmark_script
from narrow_detector import CLASSES, narrow_detector, regions
from torchvision.ops import box_iou, nms

from fimaq.detection.boxes import decode, encode

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "detector_losses.py"


@pytest.fixture(scope="module")
def losses() -> ModuleType:
    return benchmark_script("detector_losses")


@pytest.fixture(scope="module")
def truth(losses: ModuleType):
    """Two images of 64 pixels: with two objects, with one and padding. A mask is the left half of its box."""
    boxes = torch.tensor([[[4, 4, 24, 24], [30, 20, 60, 50]], [[8, 16, 40, 48], [0, 0, 0, 0]]]).double()
    masks = torch.zeros(2, 2, 64, 64, dtype=torch.bool)
    for image, number in ((0, 0), (0, 1), (1, 0)):
        left, top, right, bottom = boxes[image, number].long().tolist()
        masks[image, number, top:bottom, left : (left + right) // 2] = True
    present = torch.tensor([[True, True], [True, False]])
    return losses.Truth(boxes, torch.tensor([[0, 2], [1, 0]]), present, masks)


def test_overlaps_are_torchvisions_and_empty_boxes_overlap_nothing(losses: ModuleType):
    first, second = regions(9, 64, 64, seed=1), regions(7, 64, 64, seed=2)
    torch.testing.assert_close(losses.overlaps(first, second), box_iou(first, second))
    assert losses.overlaps(torch.zeros(1, 4), torch.zeros(1, 4)).item() == 0


def test_boxes_are_assigned_by_their_largest_overlap(losses: ModuleType):
    overlap = torch.tensor([[[0.8, 0.2, 0.5, 0.75], [0.1, 0.1, 0.6, 0.9]]])
    present = torch.tensor([[True, True]])
    assert losses.assign(overlap, present, 0.7, 0.3).tolist() == [[0, losses.NOTHING, losses.IGNORED, 1]]


def test_an_objects_best_box_shows_it_even_where_the_overlap_is_low(losses: ModuleType):
    overlap = torch.tensor([[[0.4, 0.4, 0.1], [0.0, 0.2, 0.1]]])
    present = torch.tensor([[True, True]])
    assigned = losses.assign(overlap, present, 0.7, 0.3, best_at_least=0.3)
    # Both boxes that tie for the first object; none for the second, whose best overlap is below 0.3.
    assert assigned.tolist() == [[0, 0, losses.NOTHING]]


def test_padding_is_never_assigned(losses: ModuleType):
    assigned = losses.assign(torch.ones(1, 2, 3), torch.zeros(1, 2, dtype=torch.bool), 0.7, 0.3, best_at_least=0.3)
    assert assigned.tolist() == [[losses.NOTHING] * 3]


def test_a_sample_holds_few_objects_and_fills_up_with_background(losses: ModuleType):
    torch.manual_seed(0)
    ignored, nothing = losses.IGNORED, losses.NOTHING
    assigned = torch.tensor([[0] * 20 + [nothing] * 20 + [ignored] * 10, [0] * 2 + [nothing] * 48])
    indices, used = losses.sample(assigned, torch.ones_like(assigned, dtype=torch.bool), 16, 0.25)
    chosen = assigned.gather(1, indices)
    assert used.all()
    assert (chosen >= 0).sum(dim=1).tolist() == [4, 2]
    assert (chosen == nothing).sum(dim=1).tolist() == [12, 14]
    assert all(len(row.unique()) == 16 for row in indices)


def test_what_is_not_available_is_not_used(losses: ModuleType):
    assigned = torch.tensor([[0, 0, losses.NOTHING, losses.NOTHING, losses.IGNORED]])
    available = torch.tensor([[True, False, True, False, True]])
    indices, used = losses.sample(assigned, available, 4, 0.5)
    assert sorted(indices[used].tolist()) == [0, 2]


def test_suppression_in_rounds_is_greedy_suppression(losses: ModuleType):
    for seed in range(5):
        boxes = regions(200, 64, 64, seed)
        stays = losses.suppress(boxes[None], 0.5)[0]
        expected = nms(boxes, torch.arange(200, 0, -1).double(), 0.5)
        assert stays.nonzero().flatten().tolist() == expected.sort().values.tolist()


def test_anchor_losses_of_a_perfect_and_of_an_ignorant_network(losses: ModuleType, truth):
    anchors = torch.cat([truth.boxes[0], truth.boxes[1, :1], regions(40, 64, 64)])
    ignorant = torch.zeros(2, 43).double(), torch.zeros(2, 43, 4).double()
    classes, places = losses.anchor_losses(*ignorant, anchors, truth)
    assert classes.item() == pytest.approx(math.log(2))
    assert places.item() >= 0
    limits = (*losses.ANCHOR_OVERLAPS, losses.ANCHOR_BEST)
    assigned = losses.assign(losses.overlaps(truth.boxes, anchors), truth.present, *limits)
    logits = torch.where(assigned >= 0, 50.0, -50.0).double()
    targets = truth.boxes.gather(1, assigned.clamp(min=0).unsqueeze(2).expand(-1, -1, 4))
    deltas = torch.stack([encode(anchors, of_image) for of_image in targets]).nan_to_num(0, 0, 0)
    classes, places = losses.anchor_losses(logits, deltas, anchors, truth)
    assert classes.item() == pytest.approx(0, abs=1e-9)
    assert places.item() == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("class_agnostic", [False, True])
def test_box_losses_are_those_of_the_heads_outputs(losses: ModuleType, truth, class_agnostic: bool):
    """Against a plain loop over regions."""
    torch.manual_seed(0)
    head = narrow_detector(reg_class_agnostic=class_agnostic).roi_head.bbox_head
    proposals = torch.stack([regions(30, 64, 64, seed) for seed in (1, 2)])
    chosen = losses.choose_regions(proposals, torch.ones(2, 30, dtype=torch.bool), truth, 0.5)
    features = [torch.randn(2, 16, 64 // stride, 64 // stride).double() for stride in (4, 8, 16, 32, 64)]
    classes, places, moved = losses.box_losses(head, features, chosen, truth, (64, 64))
    indexed = losses.with_image_index(list(chosen.boxes))
    logits, deltas = (x.float() for x in head(losses.pool_regions(features, indexed, 7)))
    class_sum = place_sum = 0.0
    for flat, (image, place) in enumerate((i, p) for i in range(2) for p in range(chosen.used.shape[1])):
        if not chosen.used[image, place]:
            continue
        object_, box = int(chosen.assigned[image, place]), chosen.boxes[image, place][None]
        label = int(truth.labels[image, object_]) if object_ >= 0 else CLASSES
        class_sum -= logits[flat].log_softmax(0)[label].item()
        shown = label if label < CLASSES else int(logits[flat, :CLASSES].argmax())
        delta = deltas[flat] if class_agnostic else deltas[flat, 4 * shown : 4 * shown + 4]
        torch.testing.assert_close(moved[image, place], decode(box, delta[None], (64, 64), head.stds)[0])
        if object_ >= 0:
            place_sum += (delta - encode(box, truth.boxes[image, object_][None], head.stds)[0]).abs().sum().item()
    assert classes.item() == pytest.approx(class_sum / chosen.used.sum().item(), rel=1e-5)
    assert places.item() == pytest.approx(place_sum / chosen.used.sum().item(), rel=1e-5)


def test_regions_hold_the_objects_own_boxes(losses: ModuleType, truth):
    far_away = torch.tensor([50.0, 0, 60, 10]).double().expand(2, 5, 4)
    chosen = losses.choose_regions(far_away, torch.ones(2, 5, dtype=torch.bool), truth, 0.5)
    for image, objects in enumerate(([0, 1], [0])):
        assert sorted(chosen.assigned[image, chosen.positive[image]].tolist()) == objects
        assert chosen.is_truth[image].equal(chosen.positive[image])
        shown = chosen.assigned[image, chosen.positive[image]]
        assert chosen.boxes[image, chosen.positive[image]].equal(truth.boxes[image, shown])


def test_mask_targets_are_cut_out_of_the_right_objects_mask(losses: ModuleType, truth):
    masks = truth.masks.flatten(0, 1)
    whole, right_half = [8.0, 16, 40, 48], [24.0, 16, 40, 48]
    targets = losses.mask_targets(torch.tensor([whole, right_half]).double(), torch.tensor([2, 2]), masks)
    assert targets.shape == (2, 28, 28)
    assert targets[0, :, :14].eq(1).all()
    assert targets[0, :, 14:].eq(0).all()
    assert targets[1].eq(0).all()


def test_mask_loss_reads_the_map_of_the_objects_class(losses: ModuleType, truth):
    class Fixed(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Class c has the logit c everywhere."""
            return torch.arange(3.0).view(1, 3, 1, 1).expand(len(x), 3, 28, 28)

    none = torch.zeros(2, 1, 4).double(), torch.zeros(2, 1, dtype=torch.bool)
    chosen = losses.choose_regions(*none, truth, 0.5)
    features = [torch.zeros(2, 1, 64 // stride, 64 // stride).double() for stride in (4, 8, 16, 32)]
    half = torch.tensor([1.0, 0.0])
    expected = [F.binary_cross_entropy_with_logits(torch.full((2,), float(c)), half).item() for c in (0, 2, 1)]
    assert losses.mask_loss(Fixed(), features, chosen, truth).item() == pytest.approx(sum(expected) / 3, rel=1e-5)


@pytest.mark.parametrize("name", ["mask_rcnn_swin_t", "cascade_mask_rcnn_swin_t"])
def test_every_parameter_has_a_finite_gradient(losses: ModuleType, truth, name: str):
    torch.manual_seed(0)
    detector = narrow_detector(name).train()
    parts = losses.detector_losses(detector, torch.randn(2, 3, 64, 64).double(), truth)
    assert len(parts) == (5 if name.startswith("mask") else 11)
    sum(parts.values()).backward()
    for parameter in detector.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()


def test_images_without_objects_are_background(losses: ModuleType, truth):
    nothing = truth._replace(present=torch.zeros_like(truth.present), boxes=torch.zeros_like(truth.boxes))
    parts = losses.detector_losses(narrow_detector().train(), torch.randn(2, 3, 64, 64).double(), nothing)
    assert all(loss.isfinite() for loss in parts.values())
    assert all(parts[name].item() == 0 for name in ("rpn box", "box", "mask"))
