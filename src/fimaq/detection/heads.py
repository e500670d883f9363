"""The box and mask heads of a detector, whose layers see regions of a picture and not the picture.

Their ranges are searched on what the quantized detector proposes. Then each head is learned like a block, unless
that is to be all: on regions that the full-precision detector looked at, it is shown what the quantized pyramid
has there, and should say what it said in full precision.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fimaq.config import Config
from fimaq.detection import box_head, masks
from fimaq.detection.boxes import with_image_index
from fimaq.detection.detector import Detector
from fimaq.detection.head_losses import BoxDivergence, MaskDivergence
from fimaq.detection.nms import choose_detections
from fimaq.detection.roi import pool_regions
from fimaq.detection.roi_heads import OVERLAP, Stage, boxes_and_scores, stages
from fimaq.fisher.collect import flat
from fimaq.models.units import Signature, Unit
from fimaq.quant.layers import quantized_layers, set_quantized
from fimaq.reconstruct.algorithm import Report, UnitResult, learn, scale_changes, scales_of
from fimaq.reconstruct.cache import ActivationCache
from fimaq.reconstruct.objectives import MeanSquaredError
from fimaq.reconstruct.plan import UnitPlan
from fimaq.reconstruct.step import ReconstructionStep

REGIONS, LIKELY, DETECTIONS = 64, 48, 16
"""Of each image: regions for a box head, how many of them most likely show something, regions for a mask head."""
BOX_BATCH, MASK_BATCH = 256, 32
"""Regions in a batch."""

Size = tuple[int, int]


class ChosenMasks(nn.Module):
    """A mask head that is asked for the mask of the detected class alone."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, pooled: Tensor, classes: Tensor) -> Tensor:
        """Regions (k, channels, 14, 14), and a one at the class of each (k, classes) -> logits (k, 28, 28)."""
        of_all: Tensor = self.head(pooled)
        return (of_all * classes[:, :, None, None]).sum(1)


@dataclass
class Look:
    """Regions (k, 5) of some images, what the head is given beside them, and what it says: rows on the host."""

    images: slice
    regions: Tensor
    beside: list[Tensor]
    targets: list[Tensor]


@dataclass
class Lesson:
    """One head, and what it is to learn. `side`: of a pooled region; `operations`: on one region."""

    unit: Unit
    side: int
    batch: int
    looks: list[Look] = field(default_factory=list)
    operations: float = 0.0

    def look(self, features: Sequence[Tensor], images: slice, boxes: list[Tensor], *beside: Tensor) -> None:
        """Remember what the head says of per image boxes (k, 4), in full precision."""
        regions = with_image_index(boxes)
        if not len(regions):
            return
        inputs = [pool_regions(features, regions, self.side), *beside]
        if not self.looks:
            self._sign(inputs)
        kept = [[t.cpu() for t in tensors] for tensors in (beside, self.unit(inputs))]
        self.looks.append(Look(images, regions.cpu(), *kept))

    def _sign(self, inputs: list[Tensor]) -> None:
        """Say what of the head's arguments and results is a row per region."""
        one, two = (tuple(t[:1].expand(n, *t.shape[1:]) for t in inputs) for n in (1, 2))
        self.unit.inputs = Signature.of((one, {}), (two, {}))
        with FlopCounterMode(display=False) as counter:
            self.unit.outputs = Signature.of(self.unit.module(*one), self.unit.module(*two))
        self.operations = counter.get_total_flops() / 3

    @property
    def count(self) -> int:
        return sum(len(look.regions) for look in self.looks)

    def plan(self, config: Config) -> UnitPlan:
        """Its steps, whose batches are of regions, measured in images."""
        size = max(1.0, self.operations * self.batch / config.batch_size)
        return UnitPlan(size, size, refreshes=0, iterations=config.iters)


def lessons_for(detector: Detector) -> list[Lesson]:
    """One for each head, box heads first; what they are to learn is not known yet."""
    names = {module: name for name, module in detector.named_modules()}
    box_heads, mask_heads = detector.roi_head.heads
    return [
        *(Lesson(Unit(names[head], head), box_head.REGION_SIZE, BOX_BATCH) for head in box_heads),
        *(Lesson(Unit(names[head], ChosenMasks(head)), masks.REGION_SIZE, MASK_BATCH) for head in mask_heads),
    ]


@torch.no_grad()
def look_at(detector: Detector, lessons: list[Lesson], images: Tensor, sizes: list[Size], part: slice) -> None:
    """Add what the full-precision detector looks at in `images[part]`, and says of it, to all lessons."""
    device = next(detector.parameters()).device
    features = detector.neck(detector.backbone(images[part].to(device)))
    proposals = detector.rpn_head.propose(features, sizes[part])
    passed = list(stages(detector.roi_head.heads[0], features, proposals, sizes[part]))
    for lesson, stage in zip(lessons[: len(passed)], passed, strict=True):
        lesson.look(features, part, list(worth_a_look(stage)))
    found = zip(*boxes_and_scores(passed, sizes[part]), strict=True)
    chosen = [choose_detections(boxes, scores, 0.0, OVERLAP, DETECTIONS) for boxes, scores in found]
    labels = torch.cat([labels for _, _, labels in chosen])
    classes = nn.functional.one_hot(labels, detector.num_classes).to(features[0].dtype)
    for lesson in lessons[len(passed) :]:
        lesson.look(features, part, [boxes for boxes, _, _ in chosen], classes)


def worth_a_look(stage: Stage) -> Iterator[Tensor]:
    """For each image, the boxes that most likely show something, and some of the others."""
    for boxes, logits in zip(stage.proposals, stage.logits, strict=True):
        order = logits.softmax(1)[:, -1].argsort(stable=True)
        others = order[LIKELY:]
        spread = torch.linspace(0, max(0, len(others) - 1), min(len(others), REGIONS - LIKELY))
        yield boxes[torch.cat([order[:LIKELY], others[spread.long().to(others.device)]])]


def learn_head(
    detector: Detector,
    lesson: Lesson,
    images: Tensor,
    config: Config,
    cache: ActivationCache,
    report: Report,
) -> UnitResult:
    """Learn the rounding and the scales of one head, whose ranges are searched, and fix its integers."""
    unit, layers = lesson.unit, [layer for _, layer in quantized_layers(lesson.unit.module)]
    set_quantized(unit.module, True)
    _fill(cache, detector, lesson, images)
    before = scales_of(unit.module)
    batch = min(lesson.batch, lesson.count)
    step = ReconstructionStep(
        unit, _objective(cache, lesson, config, batch), config.model_copy(update={"batch_size": batch}), cache
    )
    losses = learn(step, config.iters, report)
    finite = step.finish()
    flipped = sum(layer.harden() for layer in layers)
    weights = sum(layer.weight.numel() for layer in layers)
    return UnitResult(losses, finite, flipped, weights, scale_changes(before, unit.module))


@torch.no_grad()
def _fill(cache: ActivationCache, detector: Detector, lesson: Lesson, images: Tensor) -> None:
    """What the quantized pyramid has in the regions, and what the head should say of it."""
    start = 0
    for look in lesson.looks:
        features = detector.neck(detector.backbone(images[look.images].to(cache.device)))
        regions, *beside = (tensor.to(cache.device) for tensor in (look.regions, *look.beside))
        inputs = [pool_regions(features, regions, lesson.side), *beside]
        for name, rows in {"raw inputs": inputs, "quantized inputs": inputs, "outputs": look.targets}.items():
            cache.write(name, start, rows)
        start += len(regions)


@torch.no_grad()
def _objective(cache: ActivationCache, lesson: Lesson, config: Config, count: int) -> nn.Module:
    outputs = cache.rows("outputs", 0, count)
    targets = flat(outputs)
    deltas = flat(lesson.unit(cache.rows("quantized inputs", 0, count))) - targets
    if config.method == "qdrop":
        return MeanSquaredError(deltas)
    if isinstance(lesson.unit.module, ChosenMasks):
        return MaskDivergence(config.temperature, deltas, targets)
    return BoxDivergence(outputs[0].shape[1] - 1, config.temperature, deltas, targets)
