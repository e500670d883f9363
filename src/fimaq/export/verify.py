"""Whether an exported file does what the run's own model does, and does it in integers.

Products are exact on both sides, but every library rounds LayerNorm, softmax and GELU in its own way, in the last
bit. A network of low-bit codes amplifies that: one value on the edge of two codes falls to the other side, and
some layers later the whole image is rounded differently. How often this changes a prediction is a property of the
network, and is measured: by the run's own model against itself with the last bits of its LayerNorms disturbed. A
file should agree with the run on 99 % of the images, or as often as the run agrees with itself.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fimaq.export.sessions import Session

WANTED_AGREEMENT = 0.99
DISTURBANCES = 5
"""How often a run is compared with itself where its file is in doubt: of a few hundred images once says little."""
BATCH = 32


def verify(session: Session, model: nn.Module, images: Mapping[str, Tensor]) -> dict[str, Any]:
    """Counts of integer and float products as executed; for each set of images, how far file and model agree."""
    kinds = session.executed()
    return {
        "integer_products": sum(kinds[kind] for kind in session.integer_kinds),
        "float_products": {kind: kinds[kind] for kind in sorted(session.float_kinds) if kinds[kind]},
        "nodes": dict(kinds.most_common()),
        "agreement": {name: _compare(session, model, given) for name, given in images.items()},
    }


@torch.no_grad()
def _compare(session: Session, model: nn.Module, images: Tensor) -> dict[str, Any]:
    batches = images.split(BATCH)
    own = torch.cat([model(batch) for batch in batches])
    file = torch.cat([session(batch) for batch in batches])

    def disturbed(seed: int) -> Tensor:
        with last_bits_disturbed(model, seed):
            return torch.cat([model(batch) for batch in batches])

    def same_top1(other: Tensor) -> int:
        return int((own.argmax(1) == other.argmax(1)).sum())

    itself = disturbed(0)
    of_the_run = [same_top1(itself)]
    if _clearly_fewer(same_top1(file), _wanted(of_the_run[0], len(images)), len(images)):
        of_the_run += [same_top1(disturbed(seed)) for seed in range(1, DISTURBANCES)]
    errors = (own - file).abs()
    return {
        "images": len(images),
        "same_top1": same_top1(file),
        "same_top1_of_the_run_with_itself": round(sum(of_the_run) / len(of_the_run), 1),
        "times_disturbed": len(of_the_run),
        "largest_logit_error": round(errors.max().item(), 6),
        "mean_logit_error": round(errors.mean().item(), 6),
        "mean_logit_error_of_the_run_with_itself": round((own - itself).abs().mean().item(), 6),
        "mean_logit_size": round(own.abs().mean().item(), 6),
    }


def _wanted(of_the_run: float, count: int) -> float:
    """The share of `count` images on which a file should agree with a run that does so itself on `of_the_run`."""
    return min(WANTED_AGREEMENT, of_the_run / count)


def _clearly_fewer(same: int, wanted: float, count: int) -> bool:
    """By more than three standard errors, so that a handful of images does not refuse a good file."""
    variance = wanted * (1 - wanted) * count
    measured_too = 1 + 1 / DISTURBANCES  # what is wanted is known from as few images, disturbed in several ways
    return same < wanted * count - 3 * math.sqrt(variance * measured_too)


@contextmanager
def last_bits_disturbed(model: nn.Module, seed: int = 0) -> Iterator[None]:
    """Some outputs of LayerNorm and GELU are other floats, as they are in another library.

    Of a LayerNorm one in two is a neighbouring one: onnxruntime's differ by 0.79 of that on average, OpenVINO's by
    0.96. GELU is x / 2 times a sum, 1 + erf, that is rounded in its last bit; one in three has another.
    """
    generator = torch.Generator().manual_seed(seed)

    def disturb(module: nn.Module, inputs: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        gelu = isinstance(module, nn.GELU)
        drawn = torch.randint(6 if gelu else 4, output.shape, generator=generator)  # 0: down, 1: up, else as it is
        direction = drawn.to(output.dtype) - 0.5
        if gelu:
            other = output + direction * inputs[0].abs() * torch.finfo(output.dtype).eps
        else:
            other = torch.nextafter(output, direction * torch.inf)
        return torch.where(drawn < 2, other, output)

    hooks = [m.register_forward_hook(disturb) for m in model.modules() if isinstance(m, (nn.LayerNorm, nn.GELU))]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def shortcomings(found: dict[str, Any], products: int, floats_expected: bool) -> list[str]:
    """Why the file is not good; empty if it is. `products`: how many the run computes on integers."""
    faults = []
    if found["integer_products"] < products:
        faults.append(f"{found['integer_products']} of {products} quantized products run in integer")
    if found["float_products"] and not floats_expected:
        faults.append(f"products in float: {found['float_products']}")
    for name, compared in found["agreement"].items():
        count, same = compared["images"], compared["same_top1"]
        wanted = _wanted(compared["same_top1_of_the_run_with_itself"], count)
        if _clearly_fewer(same, wanted, count):
            faults.append(f"same top-1 as the run on {same} of {count} images ({name}), {wanted:.1%} are expected")
    return faults
