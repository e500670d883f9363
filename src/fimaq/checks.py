"""What is refused before a run has written anything."""

from pathlib import Path

import torch
from torch import Tensor

from fimaq.artifact.scalars import require_tensorboard
from fimaq.config import FISHER_METHODS, Config
from fimaq.errors import InputError
from fimaq.models.units import UnitChain
from fimaq.ranks import Ranks


def check_learnable(chain: UnitChain, example: Tensor, config: Config) -> None:
    """Refuse what nothing could be learned from. `example`: images (n, C, H, W) where the model is."""
    for unit in chain.units:
        if config.method != "rtn" and unit.reconstructed and not unit.passes_gradients:
            raise InputError(
                f"no gradients pass through {unit.name} (no_grad, detach or NumPy within), so that nothing can be "
                "learned there; use rtn"
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
    if not reached.requires_grad:
        raise InputError(
            f"method {config.method!r} takes gradients of the model's outputs, but its forward keeps none (a "
            "no_grad, detach or NumPy within); use qdrop"
        )


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
