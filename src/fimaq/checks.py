"""What is refused before a run has written anything."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fimaq.artifact.scalars import require_tensorboard
from fimaq.config import FISHER_METHODS, Config
from fimaq.errors import InputError
from fimaq.models.units import UnitChain, passes_gradients
from fimaq.ranks import Ranks


def check_learnable(chain: UnitChain, example: Tensor, config: Config) -> None:
    """Refuse what nothing could be learned from. `example`: images (n, C, H, W) where the model is."""
    for unit in chain.units:
        if config.method != "rtn" and unit.reconstructed and not unit.passes_gradients:
            raise InputError(
                f"no gradients pass through {unit.name} (no_grad, detach or NumPy within, or what they need is "
                "changed in place, as by x += ...), so that nothing can be learned there; use rtn"
            )
    if config.method not in FISHER_METHODS:
        return
    if chain.output_shape[-1:] == (1,):
        raise InputError(
            f"method {config.method!r} compares class probabilities, but the model has a single output, whose "
            "probability is always 1; use qdrop"
        )
    with torch.no_grad():
        outputs = chain.units[0](chain.first_inputs(example))
    with torch.enable_grad():
        reached = chain.suffix(0, [output.requires_grad_() for output in outputs], {})
    if not passes_gradients([reached], outputs):
        raise InputError(
            f"method {config.method!r} takes gradients of the model's outputs, but its forward keeps none (a "
            "no_grad, detach or NumPy within, or what they need is changed in place, as by x += ...); use qdrop"
        )


COMMAND_ONLY = {
    "weights": "load them into the model",
    "calib": "give its images",
    "crop_pct": "give images cropped so, and say preprocessing={'crop_pct': ...}",
    "val": "see `fimaq evaluate`",
    "val_size": "see `fimaq evaluate --val-size`",
    "class_map": "see `fimaq evaluate --class-map`",
}
"""Settings that only the command reads, which builds models and opens folders, and what to do instead."""


def check_settings(settings: dict[str, Any]) -> None:
    """Refuse what would change nothing where a model and images are given."""
    for name, instead in COMMAND_ONLY.items():
        if settings.get(name) is not None:
            raise InputError(f"{name} is not read where a model and images are given: {instead}")


def check_name(out: Path | None) -> None:
    """Refuse a place whose files libraries could not read again."""
    try:
        str(out).encode()
    except UnicodeEncodeError:
        raise InputError(f"{str(out)!r} cannot be used for --out: its name is not UTF-8") from None


def check_tensorboard(config: Config, out: Path | None) -> None:
    """Refuse curves that cannot be written."""
    if config.tensorboard:
        require_tensorboard()
        if out is None:
            raise InputError("tensorboard: its files go into the run directory; give one with out=")


def check_ranks(ranks: Ranks, config: Config, images: int) -> None:
    """Refuse more ranks than there is work for in some part of a run, and parts that are not theirs."""
    if ranks.size > 1 and config.parts not in (None, ranks.size):
        raise InputError(f"parts {config.parts}: {ranks.size} ranks work on {ranks.size} parts; leave it out")
    wanted = {"images": images, "batch_size": config.batch_size, "search_size": config.search_size}
    wanted |= {"fisher_size": config.fisher_size} if config.fisher_size else {}
    for name, value in wanted.items():
        if value < ranks.size:
            raise InputError(f"{ranks.size} ranks cannot share {name} {value}: start at most {value} processes")
