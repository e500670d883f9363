"""Detectors small enough for tests, with noise in every weight and statistic."""

from typing import Any

import torch

from fimaq.detection.build import build_detector
from fimaq.detection.detector import Detector

NARROW = {
    "embed_dim": 12,
    "depths": (1, 1, 2, 1),
    "num_heads": (1, 2, 2, 4),
    "window_size": 4,
    "channels": 16,
    "fc_channels": 32,
}
CLASSES = 3


def narrow_detector(name: str = "mask_rcnn_swin_t", **args: Any) -> Detector:
    """In float64, where equal is equal to many places and no order of near scores depends on rounding."""
    detector = build_detector(name, CLASSES, {**NARROW, **args}).double()
    generator = torch.Generator().manual_seed(1)
    for tensor in (*detector.parameters(), *detector.buffers()):
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
            scale = 0.3 if tensor.dim() == 1 else 2 / tensor[0].numel() ** 0.5
            tensor.data = tensor.data.abs() + noise.abs() * scale if _is_statistic(tensor) else noise * scale
    for name, parameter in detector.named_parameters():
        if "norm" in name and name.endswith("weight"):
            parameter.data += 1
    return detector


def _is_statistic(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 1 and not tensor.requires_grad


def images(height: int, width: int, count: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(count, 3, height, width, generator=generator, dtype=torch.float64)


def regions(count: int, height: int, width: int, seed: int = 3) -> torch.Tensor:
    """Boxes (count, 4) of all sizes within an image."""
    generator = torch.Generator().manual_seed(seed)
    corners = torch.rand(count, 2, 2, generator=generator, dtype=torch.float64)
    corners = corners.sort(dim=1).values * torch.tensor([width, height])
    corners[:, 1] += 1
    return corners.flatten(1)
