"""Accuracy of a model, and how far a quantized model is from the full-precision one."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fimaq.data.folder import ValidationSet, validation_batches
from fimaq.errors import FimaqError
from fimaq.fisher.divergence import kl_divergence
from fimaq.progress import Silent


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


@torch.no_grad()
def evaluate_models(
    models: dict[str, nn.Module],
    dataset: ValidationSet,
    batch_size: int,
    device: torch.device,
    progress: Silent | None = None,
) -> dict[str, Any]:
    """Top-1 and top-5 in percent of every model, over the same images, read once.

    With two models, "full_precision" and "quantized", also their mean KL divergence and top-1 agreement.
    """
    progress = progress or Silent()
    tallies = {name: Tally() for name in models}
    agreement = divergence = 0.0
    unreadable = done = 0
    progress.start("evaluating", len(dataset))
    for images, targets, skipped in validation_batches(dataset, batch_size):
        unreadable += skipped
        logits = {name: _logits(model, images.to(device)) for name, model in models.items()}
        for name, values in logits.items():
            tallies[name].add(values, targets)
        if {"full_precision", "quantized"} <= logits.keys():
            full, quantized = logits["full_precision"], logits["quantized"]
            agreement += float((full.argmax(1) == quantized.argmax(1)).sum())
            divergence += float(kl_divergence(full, quantized).sum())
        done += len(targets) + skipped
        progress.update(done)
    images_seen = next(iter(tallies.values())).images
    result: dict[str, Any] = {name: tally.percent() for name, tally in tallies.items()}
    result |= {"images": images_seen, "unreadable": unreadable}
    if len(models) == 2:
        result["agreement"] = round(100 * agreement / max(1, images_seen), 3)
        result["kl_divergence"] = divergence / max(1, images_seen)
    return result


def _logits(model: nn.Module, images: Tensor) -> Tensor:
    try:
        return model(images).float().cpu()  # type: ignore[no-any-return]
    except (RuntimeError, AssertionError, ValueError) as error:  # also out of memory, as the message then says
        shape = tuple(images.shape)
        raise FimaqError(f"the model cannot be evaluated on images of shape {shape}: {error}") from error


@torch.no_grad()
def fidelity(model: nn.Module, batches: Iterator[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """KL divergence and agreement of a model with given full-precision logits, over calibration images.

    Logits are (n, classes), or (n, decisions, classes): then agreement is the share of equal decisions.
    """
    count = agreement = divergence = 0.0
    for images, teacher in batches:
        logits = model(images)
        count += len(logits)
        agreement += float((logits.argmax(-1) == teacher.argmax(-1)).view(len(logits), -1).double().mean(1).sum())
        divergence += float(kl_divergence(teacher, logits).sum())
    return {"kl_divergence": divergence / count, "agreement": round(100 * agreement / count, 3)}
