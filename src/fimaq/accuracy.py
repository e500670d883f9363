"""Accuracy of a model, and how far a quantized model is from the full-precision one."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fimaq.allocator import reused
from fimaq.data.folder import ValidationSet, validation_batches
from fimaq.device import fast_products
from fimaq.errors import FimaqError
from fimaq.fisher.divergence import kl_divergence
from fimaq.progress import Silent
from fimaq.ranks import ALONE, Ranks

Observe = Callable[[Tensor, Tensor, dict[str, Tensor]], None]
"""Called with images (n, C, H, W), targets (n,) and each model's logits (n, classes), on the CPU."""
CPU_AT_ONCE = 16
"""Images of a batch that go through a model together on a CPU, where fewer are faster."""


class Tally:
    """Counts of right answers, in percent when asked."""

    def __init__(self) -> None:
        self.images = self.top1 = self.top5 = 0

    def add(self, logits: Tensor, targets: Tensor) -> None:
        ranked = logits.topk(min(5, logits.shape[1]), dim=1).indices == targets[:, None]
        self.images += len(targets)
        self.top1 += int(ranked[:, 0].sum())
        self.top5 += int(ranked.any(1).sum())

    def percent(self) -> dict[str, float]:
        return {k: round(100 * v / max(1, self.images), 3) for k, v in (("top1", self.top1), ("top5", self.top5))}


class Pairs:
    """How two models' answers to the same images go together: what a paired comparison needs."""

    def __init__(self) -> None:
        self.images = self.agreement = 0
        self.right = {"both": 0, "only_full_precision": 0, "only_quantized": 0, "neither": 0}
        self.divergence = self.squares = 0.0

    def add(self, full: Tensor, quantized: Tensor, targets: Tensor) -> None:
        """Logits (n, classes) of both models, targets (n,)."""
        one, two = full.argmax(1), quantized.argmax(1)
        divergences = kl_divergence(full, quantized).double()
        self.images += len(targets)
        self.agreement += int((one == two).sum())
        self.divergence += float(divergences.sum())
        self.squares += float(divergences.square().sum())
        first, second = one == targets, two == targets
        cells = (first & second, first & ~second, ~first & second, ~first & ~second)
        for name, cell in zip(self.right, cells, strict=True):
            self.right[name] += int(cell.sum())

    def as_dict(self) -> dict[str, Any]:
        count = max(1, self.images)
        mean = self.divergence / count
        variance = max(0.0, self.squares / count - mean**2) * count / max(1, count - 1)
        return {
            "agreement": round(100 * self.agreement / count, 3),
            "kl_divergence": mean,
            "kl_standard_error": math.sqrt(variance / count),
            "top1_right": self.right,
        }


@torch.no_grad()
@reused()
def evaluate_models(
    models: dict[str, nn.Module],
    dataset: ValidationSet,
    batch_size: int,
    device: torch.device,
    progress: Silent | None = None,
    observe: Observe | None = None,
) -> dict[str, Any]:
    """Top-1 and top-5 in percent of every model, over the same images, read once.

    With two models, "full_precision" and "quantized", also their mean KL divergence, top-1 agreement, and how many
    images each got right alone.
    """
    progress = progress or Silent()
    tallies = {name: Tally() for name in models}
    pairs = Pairs()
    unreadable = done = 0
    progress.start("evaluating", len(dataset))
    for images, targets, skipped in validation_batches(dataset, batch_size):
        unreadable += skipped
        with fast_products(device):
            logits = {name: _logits(model, images.to(device)) for name, model in models.items()}
        for name, values in logits.items():
            tallies[name].add(values, targets)
        if {"full_precision", "quantized"} <= logits.keys():
            pairs.add(logits["full_precision"], logits["quantized"], targets)
        if observe is not None:
            observe(images, targets, logits)
        done += len(targets) + skipped
        progress.update(done)
    images_seen = next(iter(tallies.values())).images
    result: dict[str, Any] = {name: tally.percent() for name, tally in tallies.items()}
    result |= {"images": images_seen, "unreadable": unreadable}
    if len(models) == 2:
        result |= pairs.as_dict()
    return result


def _logits(model: nn.Module, images: Tensor) -> Tensor:
    parts = images.split(CPU_AT_ONCE) if images.device.type == "cpu" else (images,)
    try:
        return torch.cat([model(part).float().cpu() for part in parts])
    except (RuntimeError, AssertionError, ValueError) as error:  # also out of memory, as the message then says
        shape = tuple(images.shape)
        raise FimaqError(f"the model cannot be evaluated on images of shape {shape}: {error}") from error


@torch.no_grad()
def fidelity(model: nn.Module, batches: Iterator[tuple[Tensor, Tensor]], ranks: Ranks = ALONE) -> dict[str, float]:
    """KL divergence and agreement of a model with given full-precision logits, over the images of all ranks.

    Logits are (n, classes), or (n, decisions, classes): then agreement is the share of equal decisions.
    """
    count = agreement = divergence = 0.0
    for images, teacher in batches:
        logits = model(images)
        count += len(logits)
        agreement += float((logits.argmax(-1) == teacher.argmax(-1)).view(len(logits), -1).double().mean(1).sum())
        divergence += float(kl_divergence(teacher, logits).sum())
    sums = torch.tensor([count, agreement, divergence], dtype=torch.float64)
    ranks.sum_(sums)
    count, agreement, divergence = sums.tolist()
    return {"kl_divergence": divergence / count, "agreement": round(100 * agreement / count, 3)}
