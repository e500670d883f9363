"""LayerNorm folding: every channel of a LayerNorm's output gets the same range, at no cost at inference.

y = LN(x) becomes y' = (y - middle) / spread by changing the LayerNorm's weight and bias; the Linear layers
that read it take the inverse into their weight and bias. Which layers these are is found by experiment, and
a fold that changes the model's output (because something else reads y, or pads it with zeros) is undone.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from timm.layers import LayerNorm2d
from torch import Tensor, nn

from fimaq.models.products import watched
from fimaq.quant.layers import QuantLinear
from fimaq.ranks import ALONE, Ranks

TOLERANCE = 1e-3
SMALLEST_SPREAD = 1e-3
"""Channels narrower than this share of the mean are widened to it, so that no weight is divided by ~0."""


@torch.no_grad()
def fold_layer_norms(
    model: nn.Module, example: Tensor, images: Callable[[], Iterator[Tensor]], ranks: Ranks = ALONE
) -> dict[str, str]:
    """Fold every LayerNorm that can be. Returns name -> "folded" | "scaled" (no shift) for those that were.

    `example`: two or more images to check with; `images()`: batches the ranges are taken from, of this rank.
    """
    norms = {
        name: m
        for name, m in model.named_modules()
        if isinstance(m, nn.LayerNorm) and not isinstance(m, LayerNorm2d)
        if m.weight is not None and m.bias is not None
    }
    extremes = _channel_extremes(model, norms, images, ranks)
    reference = model(example)
    folded: dict[str, str] = {}
    for name, norm in norms.items():
        if name not in extremes:
            continue
        readers = find_readers(model, norm, example)
        low, high = extremes[name]
        spread = high - low
        spread = (spread / spread.mean()).clamp_min(SMALLEST_SPREAD)
        if not readers or not spread.isfinite().all():
            continue
        for kind, middle in (("folded", (low + high) / 2), ("scaled", torch.zeros_like(low))):
            if _try_fold(model, norm, readers, spread, middle, example, reference):
                folded[name] = kind
                break
    return folded


def _try_fold(
    model: nn.Module,
    norm: nn.LayerNorm,
    readers: list[QuantLinear],
    spread: Tensor,
    middle: Tensor,
    example: Tensor,
    reference: Tensor,
) -> bool:
    """Fold, compare the model's output with `reference`, and undo when it differs."""
    changed: list[Any] = [norm, *readers]
    before = [(m, m.weight.data.clone(), None if m.bias is None else m.bias.data.clone()) for m in changed]
    for reader in readers:
        if middle.any():
            shift = reader.weight.data @ middle
            reader.bias = _fixed(shift if reader.bias is None else reader.bias.data + shift)
        reader.weight.data = reader.weight.data * spread
    norm.weight.data = norm.weight.data / spread
    norm.bias.data = (norm.bias.data - middle) / spread
    if _close(model(example), reference):
        return True
    for module, weight, bias in before:
        module.weight.data = weight
        module.bias = None if bias is None else _fixed(bias)
    return False


def _fixed(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _close(output: Tensor, reference: Tensor) -> bool:
    return bool((output - reference).norm() <= TOLERANCE * reference.norm() + torch.finfo(output.dtype).tiny)


def _channel_extremes(
    model: nn.Module, norms: dict[str, nn.LayerNorm], images: Callable[[], Iterator[Tensor]], ranks: Ranks
) -> dict[str, tuple[Tensor, Tensor]]:
    """LayerNorm name -> smallest and largest output of each channel, (channels,) each."""
    below: dict[str, Tensor] = {}
    above: dict[str, Tensor] = {}

    def observer(name: str) -> Any:
        def observe(module: nn.Module, args: Any, output: Tensor) -> None:
            rows = output.flatten(0, -2)
            for found, largest in ((below, -rows.amin(0)), (above, rows.amax(0))):
                found[name] = torch.maximum(largest, found[name]) if name in found else largest

        return observe

    hooks = [norm.register_forward_hook(observer(name)) for name, norm in norms.items()]
    try:
        for batch in images():
            model(batch)
    finally:
        for hook in hooks:
            hook.remove()
    ranks.largest_(*below.values(), *above.values())
    return {name: (-below[name], above[name]) for name in above}


def find_readers(model: nn.Module, norm: nn.LayerNorm, example: Tensor) -> list[QuantLinear]:
    """Linear layers whose input is the norm's output, moved around but channel by channel unchanged.

    Each channel is multiplied by a number of its own: a reader is who sees exactly these factors.
    """
    factors = torch.linspace(0.5, 2.0, norm.normalized_shape[-1], device=example.device, dtype=example.dtype)
    candidates = [m for m in model.modules() if isinstance(m, QuantLinear) and m.in_features == len(factors)]
    plain = _inputs_of(model, candidates, example)
    with _output_times(norm, factors):
        scaled = _inputs_of(model, candidates, example)
    return [m for m in plain if torch.allclose(scaled[m], plain[m] * factors, rtol=1e-3, atol=1e-6)]


def _inputs_of(model: nn.Module, layers: list[QuantLinear], example: Tensor) -> dict[QuantLinear, Tensor]:
    inputs: dict[QuantLinear, Tensor] = {}
    hooks = [m.register_forward_pre_hook(lambda m, args: inputs.__setitem__(m, args[0].clone())) for m in layers]
    try:
        with watched(model):
            model(example)
    finally:
        for hook in hooks:
            hook.remove()
    return inputs


@contextmanager
def _output_times(norm: nn.LayerNorm, factors: Tensor) -> Iterator[None]:
    hook = norm.register_forward_hook(lambda module, args, output: output * factors)
    try:
        yield
    finally:
        hook.remove()
