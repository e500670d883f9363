"""Massive channels: in many ViTs a few channels of a hidden layer are tens of times larger than all the others.

One static range cannot hold both. So such a channel is divided: it gets several columns of the Linear that reads
it, each with an equal share of its value and the same weights. In full precision nothing changes, every column now
fits into the range of the others, and the product stays one product of integers, a few columns wider.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fimaq.models.products import watched
from fimaq.quant.layers import QuantLinear
from fimaq.ranks import ALONE, Ranks

MASSIVE = 4.0
"""A channel is massive when its largest value is this many times that of the larger ordinary ones."""
ORDINARY = 64
"""The larger ordinary channels: one in 64 is larger still."""
COLUMNS = 16
"""Columns are added in sixteens: rows of other lengths are multiplied more slowly."""
MOST_ADDED = 0.25
"""Of a layer's columns, by all its massive channels together."""


@torch.no_grad()
def divide_massive_channels(
    model: nn.Module, images: Callable[[], Iterator[Tensor]], ranks: Ranks = ALONE
) -> dict[str, dict[int, int]]:
    """Divide the massive input channels of every Linear. Returns name -> channel -> number of its columns.

    `images()`: batches that the sizes of channels are taken from, of this rank.
    """
    divided = {}
    sizes = _channel_sizes(model, images)
    ranks.largest_(*sizes.values())
    for name, size in sizes.items():
        columns = _columns_for(size)
        if columns:
            layer = model.get_submodule(name)
            assert isinstance(layer, QuantLinear)
            layer.divide(columns)
            divided[name] = columns
    return divided


def _columns_for(size: Tensor) -> dict[int, int]:
    """Channel -> columns for the massive ones among channels whose largest absolute values are `size`, (in,)."""
    if len(size) < ORDINARY or not size.isfinite().all():
        return {}
    ordinary = size.sort(descending=True).values[len(size) // ORDINARY].item()
    massive = [c for c in range(len(size)) if size[c] > MASSIVE * ordinary > 0]
    columns = {}
    for channel in massive:
        needed = math.ceil((size[channel].item() / ordinary - 1) / COLUMNS)
        affordable = int(MOST_ADDED * len(size) / len(massive)) // COLUMNS
        if affordable > 0:
            columns[channel] = 1 + COLUMNS * min(needed, affordable)
    return columns


def _channel_sizes(model: nn.Module, images: Callable[[], Iterator[Tensor]]) -> dict[str, Tensor]:
    """Name of a Linear -> largest absolute value of each of its input channels, (in,)."""
    sizes: dict[str, Tensor] = {}

    def observer(name: str) -> Any:
        def observe(module: nn.Module, args: Any) -> None:
            largest = args[0].flatten(0, -2).abs().amax(0)
            sizes[name] = torch.maximum(largest, sizes[name]) if name in sizes else largest

        return observe

    hooks = [
        layer.register_forward_pre_hook(observer(name))
        for name, layer in model.named_modules()
        if isinstance(layer, QuantLinear)
    ]
    try:
        with watched(model):
            for batch in images():
                model(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return sizes
