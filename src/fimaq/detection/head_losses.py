"""What the heads of a detector minimise: the KL divergence between what they say in full precision and quantized.

Nothing follows a head, so no Fisher matrix is needed. A box head's output is read as a class and, given the class,
four deltas with normal errors, whose divergence is half the squared difference; a mask head's as one decision per
pixel. Each is divided by its value at the start, as `reconstruct/objectives.py` does.
"""

import torch
from torch import Tensor, nn

from fimaq.fisher.divergence import kl_divergence


class BoxDivergence(nn.Module):
    """Outputs (n, classes + 1 + deltas), the background's logit the last of the classes'."""

    normalisers: Tensor

    def __init__(self, classes: int, temperature: float, first_deltas: Tensor, targets: Tensor) -> None:
        super().__init__()
        self.classes, self.temperature = classes, temperature
        self.register_buffer("normalisers", self.terms(first_deltas, targets).clamp_min(1e-38))

    def forward(self, deltas: Tensor, targets: Tensor) -> Tensor:
        return (self.terms(deltas, targets) / self.normalisers).mean()

    def terms(self, deltas: Tensor, targets: Tensor) -> Tensor:
        """Of classes and of boxes, averaged over regions: (2,)."""
        sizes = [self.classes + 1, deltas.shape[1] - self.classes - 1]
        (logits, _), (logit_errors, box_errors) = targets.split(sizes, 1), deltas.split(sizes, 1)
        classes = kl_divergence(logits, logits + logit_errors, self.temperature)
        # A box is asked for only where its class is: deltas of other classes, and of the background, do not count.
        likely = logits.softmax(1)[:, : self.classes]
        boxes = (likely * box_errors.unflatten(1, (-1, 4)).square().sum(2)).sum(1) / 2
        return torch.stack([classes.mean(), boxes.mean()])


class MaskDivergence(nn.Module):
    """Outputs (n, pixels): the logit of each pixel to belong to the object."""

    normaliser: Tensor

    def __init__(self, temperature: float, first_deltas: Tensor, targets: Tensor) -> None:
        super().__init__()
        self.temperature = temperature
        self.register_buffer("normaliser", self.divergence(first_deltas, targets).clamp_min(1e-38))

    def forward(self, deltas: Tensor, targets: Tensor) -> Tensor:
        return self.divergence(deltas, targets) / self.normaliser

    def divergence(self, deltas: Tensor, targets: Tensor) -> Tensor:
        teacher, student = (torch.stack([x, torch.zeros_like(x)], -1) for x in (targets, targets + deltas))
        return kl_divergence(teacher, student, self.temperature).mean()
