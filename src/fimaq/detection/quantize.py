"""Quantizing a detector as the paper does.

Backbone and pyramid are reconstructed, block by block, under the KL divergence between the proposal network's
classification outputs in full precision and quantized. Of the proposal network only the ranges are searched. So it
is with the heads that look at regions in the paper; here they are learned too, unless that is not wanted.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from fimaq.calibrate.ranges import set_ranges
from fimaq.config import Config
from fimaq.data.detection_image import DetectionPreprocessing
from fimaq.detection.conv import fold_batch_norms
from fimaq.detection.detector import Detector
from fimaq.detection.heads import Size, learn_head, lessons_for, look_at
from fimaq.errors import InputError
from fimaq.models.prepare import Structure
from fimaq.models.units import Unit
from fimaq.pipeline import Run, run_quantization
from fimaq.progress import Silent
from fimaq.quant.layers import can_convert, convert_layer, quantized_layers
from fimaq.reconstruct.algorithm import Report, UnitResult
from fimaq.reconstruct.cache import ActivationCache
from fimaq.reconstruct.memory import sweep_of
from fimaq.reconstruct.plan import UnitPlan


class ProposalScores(nn.Module):
    """A detector seen from its proposals: images (n, 3, H, W) -> logits (n, anchors, 2), object or not.

    It shares the detector's parts under the detector's names, also those that its forward pass does not reach, so
    that what is quantized and stored here is the detector itself.
    """

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self.backbone, self.neck = detector.backbone, detector.neck
        self.rpn_head, self.roi_head = detector.rpn_head, detector.roi_head
        self.num_classes = detector.num_classes

    def forward(self, images: Tensor) -> Tensor:
        logits, _ = self.rpn_head(self.neck(self.backbone(images)))
        objects = torch.cat([level.flatten(1) for level in logits], dim=1)
        return torch.stack([objects, torch.zeros_like(objects)], dim=-1)


def quantize_detector(
    detector: Detector,
    images: Tensor,
    sizes: list[Size],
    config: Config,
    preprocessing: DetectionPreprocessing | None,
    fingerprint: str,
    out: Path | None,
    resume: bool,
    progress: Silent,
) -> Run:
    """Quantize `detector` in place and store the run.

    `images`: the calibration set on one canvas, (n, 3, H, W); `sizes`: (height, width) of each image on it.
    """
    if config.preset != "deploy":
        raise InputError(
            f"preset {config.preset!r} has a scale per token position, and a detector takes images of any size; "
            "use preset 'deploy'"
        )

    heads = RegionHeads(detector, images, sizes, config)
    front = ProposalScores(detector)
    stored = (preprocessing, fingerprint, out, resume, progress)
    run = run_quantization(front, images, config, *stored, only_searched=("rpn_head",), rest=heads)
    return Run(detector, config, run.metrics, out)


class RegionHeads:
    """The box and mask heads: what is quantized of a detector behind its proposals."""

    def __init__(self, detector: Detector, images: Tensor, sizes: list[Size], config: Config) -> None:
        self.detector, self.images, self.sizes, self.config = detector, images, sizes, config
        learned = config.heads == "learned" and config.method != "rtn"
        self.lessons = lessons_for(detector) if learned else []

    def prepare(self, structure: Structure) -> None:
        heads, bits = self.detector.roi_head, (self.config.weight_bits, self.config.activation_bits)
        fold_batch_norms(heads)
        for name, layer in heads.named_modules():
            if can_convert(layer):
                convert_layer(layer, *bits)
                structure.layers[f"roi_head.{name}"] = bits
            elif isinstance(layer, nn.ConvTranspose2d):
                structure.stayed_float.append(f"roi_head.{name} (ConvTranspose2d)")
        heads.requires_grad_(False)

    def look(self) -> list[UnitPlan]:
        """Remember what the heads look at and say in full precision. Returns what learning it will take."""
        if self.lessons:
            for part in self._parts(len(self.images)):
                look_at(self.detector, self.lessons, self.images, self.sizes, part)
        self.lessons = [lesson for lesson in self.lessons if lesson.looks]
        return [lesson.plan(self.config) for lesson in self.lessons]

    @property
    def units(self) -> list[Unit]:
        return [lesson.unit for lesson in self.lessons]

    @torch.no_grad()
    def search(self) -> None:
        """Search all ranges, on what the quantized detector proposes in a few images; fix what is not learned."""
        heads = self.detector.roi_head

        def run() -> None:
            for part in self._parts(min(len(self.images), self.config.search_size)):
                self.detector(self.images[part].to(next(heads.parameters()).device), self.sizes[part])

        with self.detector.every_region_counts():
            set_ranges(heads, run, self.config.preset, self.config.relative_errors, keep_on_host=True)
        learned = {layer for unit in self.units for _, layer in quantized_layers(unit.module)}
        for _, layer in quantized_layers(heads):
            if layer not in learned:
                layer.harden()

    def learn(self, number: int, room: Callable[[int], ActivationCache], report: Report) -> UnitResult:
        """Learn one of the units. `room`: a cache for so many regions."""
        lesson = self.lessons[number]
        torch.manual_seed(self.config.seed * 1009 + 500 + number)
        cache = room(lesson.count)
        try:
            return learn_head(self.detector, lesson, self.images, self.config, cache, report)
        finally:
            cache.close()

    def _parts(self, count: int) -> Iterator[slice]:
        """The first images, as many at a time as can be looked at together."""
        step = sweep_of(self.images)
        return (slice(start, min(start + step, count)) for start in range(0, count, step))
