"""Quantizing a detector as the paper does.

Backbone and pyramid are reconstructed, block by block, under the KL divergence between the proposal network's
classification outputs in full precision and quantized. Of the proposal network and of the heads that look at
regions, only the ranges are searched.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fimaq.calibrate.ranges import set_ranges
from fimaq.config import Config
from fimaq.data.detection_image import DetectionPreprocessing
from fimaq.detection.conv import fold_batch_norms
from fimaq.detection.detector import Detector
from fimaq.errors import InputError
from fimaq.models.prepare import Structure
from fimaq.pipeline import Run, run_quantization
from fimaq.progress import Silent
from fimaq.quant.layers import can_convert, convert_layer, quantized_layers
from fimaq.reconstruct.memory import sweep_of

Size = tuple[int, int]


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


@dataclass(frozen=True)
class RegionHeads:
    """The box and mask heads, whose layers see regions of a picture and not the picture."""

    detector: Detector
    images: Tensor
    sizes: list[Size]
    config: Config

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

    @torch.no_grad()
    def quantize(self) -> None:
        """Search all ranges, on what the quantized detector proposes in a few images."""
        heads = self.detector.roi_head
        device = next(heads.parameters()).device
        few, step = min(len(self.images), self.config.search_size), sweep_of(self.images)

        def run() -> None:
            for start in range(0, few, step):
                stop = min(start + step, few)
                self.detector(self.images[start:stop].to(device), self.sizes[start:stop])

        relative = self.config.method != "qdrop"
        with self.detector.every_region_counts():
            set_ranges(heads, run, self.config.preset, relative, keep_on_host=True)
        for _, layer in quantized_layers(heads):
            layer.harden()
