"""What box and mask heads are shown and what they minimise, against torch's own distributions."""

from collections.abc import Callable

import pytest
import torch
from narrow_detector import CLASSES, images, narrow_detector
from torch import Tensor
from torch.distributions import Bernoulli, Categorical, Normal, kl_divergence

from fimaq.detection.head_losses import BoxDivergence, MaskDivergence
from fimaq.detection.heads import DETECTIONS, LIKELY, REGIONS, Lesson, lessons_for, look_at, worth_a_look
from fimaq.detection.masks import MASK_SIZE
from fimaq.detection.roi_heads import Stage

HEIGHT, WIDTH = 64, 96


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def box_terms(classes: int, deltas_per_region: int, targets: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
    logits, other_logits = targets[:, : classes + 1], outputs[:, : classes + 1]
    chosen = kl_divergence(Categorical(logits=logits), Categorical(logits=other_logits)).mean()
    boxes, other_boxes = (
        t[:, classes + 1 :].reshape(len(t), deltas_per_region // 4, 4) for t in (targets, outputs)
    )
    moved = kl_divergence(Normal(boxes, 1.0), Normal(other_boxes, 1.0)).sum(2).expand(-1, classes)
    return chosen, (logits.softmax(1)[:, :classes] * moved).sum(1).mean()


@pytest.mark.parametrize("deltas_per_region", [4, 4 * CLASSES])
def test_boxes_diverge_by_their_class_and_by_where_they_are(deltas_per_region: int) -> None:
    targets, first, now = (random(7, CLASSES + 1 + deltas_per_region, seed=seed) for seed in range(3))
    objective = BoxDivergence(CLASSES, 1.0, first, targets)
    at_first = box_terms(CLASSES, deltas_per_region, targets, targets + first)
    at_last = box_terms(CLASSES, deltas_per_region, targets, targets + now)
    expected = sum(last / one for last, one in zip(at_last, at_first, strict=True)) / 2
    torch.testing.assert_close(objective(now, targets), expected)
    assert objective(first, targets).item() == pytest.approx(1)


def test_masks_diverge_pixel_by_pixel() -> None:
    targets, first, now = (random(5, 9, seed=seed) for seed in range(3))

    def divergence(errors: Tensor) -> Tensor:
        return kl_divergence(Bernoulli(logits=targets), Bernoulli(logits=targets + errors)).sum(1).mean()

    objective = MaskDivergence(1.0, first, targets)
    torch.testing.assert_close(objective(now, targets), divergence(now) / divergence(first))


@pytest.fixture(scope="module", params=["mask_rcnn_swin_t", "cascade_mask_rcnn_swin_t"])
def lessons(request: pytest.FixtureRequest) -> list[Lesson]:
    detector = narrow_detector(request.param).eval()
    found = lessons_for(detector)
    pictures, sizes = images(HEIGHT, WIDTH, 3), [(HEIGHT, WIDTH)] * 3
    for part in (slice(0, 2), slice(2, 3)):
        look_at(detector, found, pictures, sizes, part)
    return found


def test_every_head_looks_at_regions_of_every_image(lessons: list[Lesson]) -> None:
    for lesson in lessons:
        most = REGIONS if "bbox" in lesson.unit.name else DETECTIONS
        for look in lesson.looks:
            of_images = look.regions[:, 0].long().bincount()
            assert len(of_images) == look.images.stop - look.images.start
            assert of_images.min() > 0
            assert of_images.max() <= most
        assert lesson.count == sum(len(look.targets[0]) for look in lesson.looks)
        assert lesson.operations > 0


@pytest.mark.parametrize("proposals", [1, LIKELY, REGIONS - 1, 1000])
def test_regions_that_show_something_are_looked_at_and_some_others(proposals: int, lessons: list[Lesson]) -> None:
    logits = random(proposals, CLASSES + 1, seed=1)
    boxes = torch.arange(proposals)[:, None].expand(-1, 4)
    (chosen,) = worth_a_look(Stage(lessons[0].unit.module, [boxes], (logits,), (boxes,)))
    numbers = chosen[:, 0]
    assert len(numbers.unique()) == len(numbers) == min(proposals, REGIONS)
    background = logits.softmax(1)[:, -1]
    likely, others = background[numbers[:LIKELY]], background[numbers[LIKELY:]]
    assert torch.equal(likely, background.sort().values[:LIKELY])
    if proposals > REGIONS:
        assert others.max() == background.max()


def test_a_mask_head_is_asked_for_one_class(lessons: list[Lesson]) -> None:
    (classes,), (masks,) = lessons[-1].looks[0].beside, lessons[-1].looks[0].targets
    assert classes.shape[1] == CLASSES
    assert classes.sum(1).eq(1).all()
    assert masks.shape[1:] == (MASK_SIZE, MASK_SIZE)
    pooled = random(len(classes), lessons[-1].unit.module.head.convs[0].conv.in_channels, 14, 14, seed=4)
    whole: Callable[[Tensor], Tensor] = lessons[-1].unit.module.head
    rows = torch.arange(len(classes))
    expected = whole(pooled)[rows, classes.argmax(1)]
    torch.testing.assert_close(lessons[-1].unit.module(pooled, classes), expected)
