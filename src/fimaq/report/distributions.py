"""Histograms of what is quantized, each with the range that was chosen for it."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fimaq.quant.layers import QuantizedLayer, QuantMatMul, largest_of_rows
from fimaq.quant.quantizers import Quantizer

BINS = 48


@dataclass(frozen=True)
class Distribution:
    """Values of one tensor. `counts`: BINS of equal width from `low` to `high`, the extremes that occur.

    `chosen`: the smallest and the largest value that the quantizer can represent; where it has several ranges
    (channels of a weight, tokens), their medians, and `ranges` says how many. `outside`: share of values beyond
    the range that applies to them, by half a step at least: they are clipped, not just rounded.
    """

    what: str
    bits: int
    counts: list[int]
    low: float
    high: float
    chosen: tuple[float, float]
    ranges: int
    outside: float


@torch.no_grad()
def distributions_of(full: nn.Module, quantized: nn.Module, inputs: tuple[Tensor, ...]) -> Iterator[Distribution]:
    """Of a layer's input and weight, or of a product's two operands, in full precision.

    `full` and `quantized` are counterparts of twin models, `inputs` what the full-precision one was called with.
    """
    if isinstance(quantized, QuantMatMul):
        left, right = inputs[:2]
        rescaled = quantized.rescales_rows
        shown = left / largest_of_rows(left) if rescaled else left
        name = "left operand, rows divided by their largest" if rescaled else "left operand"
        yield _distribution(name, shown, quantized.left_quantizer)
        yield _distribution("right operand", right, quantized.right_quantizer)
    else:
        assert isinstance(full, QuantizedLayer)
        assert isinstance(quantized, QuantizedLayer)
        yield _distribution("input", full.columns(inputs[0]), quantized.input_quantizer)
        yield _distribution("weight", full.weight, quantized.weight_quantizer)


def _distribution(what: str, values: Tensor, quantizer: Quantizer) -> Distribution:
    """`values` broadcast against the quantizer's scale."""
    lowest = -quantizer.zero_point * quantizer.scale
    highest = (quantizer.levels - quantizer.zero_point) * quantizer.scale
    half = quantizer.scale / 2
    outside = ((values < lowest - half) | (values > highest + half)).double().mean()
    low, high = values.amin().float(), values.amax().float()
    counts = torch.histc(values.float(), BINS, float(low), float(high))
    return Distribution(
        what,
        quantizer.bits,
        [int(count) for count in counts.cpu()],
        float(low),
        float(high),
        (float(lowest.float().median()), float(highest.float().median())),
        quantizer.scale.numel(),
        float(outside),
    )
