"""Scales under which few values lie right between two codes.

Where x / scale is a whole number and a half, the last bit of x decides the code, and every library computes the
last bits of a GELU, a softmax or a LayerNorm in its own way. One such value in an image, and everything after it
is rounded differently. Values are not spread evenly: sums of integers recur, so one unlucky number can meet a
third of all images. A scale that differs by some thousandths, which accuracy does not notice, avoids those.
"""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fimaq.calibrate.ranges import recorded_inputs
from fimaq.calibrate.reciprocals import divisible
from fimaq.quant.layers import QuantizedLayer, QuantMatMul, largest_of_rows
from fimaq.quant.quantizers import ActivationQuantizer
from fimaq.ranks import ALONE, Ranks

NEAR = 2e-6
"""How close to the middle between two codes a value must be to count, in steps: what libraries differ by."""
FACTORS = [1 + step * sign / 1000 for step in range(6) for sign in (1, -1)][1:]
"""Changes of a scale that are tried, the smallest first: none, then up to half a percent."""
UNLUCKY = 2.0
"""How many times more than usual must lie between two codes."""


@torch.no_grad()
def avoid_ties(unit: nn.Module, run: Callable[[], Any], ranks: Ranks = ALONE, keep_on_host: bool = False) -> None:
    """Change scales below the quantized `unit` slightly where much lies between two codes.

    `run()` runs it on the images of this rank; what lies between codes is counted over all of them. What the
    layers saw waits for its turn on the device, or with `keep_on_host` in host memory.
    """
    recorded = recorded_inputs(unit, run, keep_on_host)
    for module in list(recorded):
        device = next(module.buffers()).device
        inputs = [tensor.to(device) for tensor in recorded.pop(module)]
        changed = [_move_away(quantizer, x, ranks) for quantizer, x in _quantized(module, inputs)]
        if any(changed):  # then everything after it sees other values
            recorded = recorded_inputs(unit, run, keep_on_host)


def _move_away(quantizer: ActivationQuantizer, x: Tensor, ranks: Ranks) -> bool:
    """Change the scale if clearly more lies between two codes than under a neighbouring one."""
    if quantizer.scale.numel() > 1:
        return False
    scales = [quantizer.scale, *(divisible(quantizer.scale * factor) for factor in FACTORS[1:])]
    counted = torch.tensor([_between_codes(quantizer, x, scale) for scale in scales])
    ranks.sum_(counted)
    counts = counted.tolist()
    if counts[0] <= max(1.0, UNLUCKY * statistics.median(counts)):
        return False
    quantizer.set_range(scales[counts.index(min(counts))], quantizer.zero_point)
    return True


def _quantized(module: nn.Module, inputs: list[Tensor]) -> Iterator[tuple[ActivationQuantizer, Tensor]]:
    """The quantizers of a layer or product, each with what it quantizes."""
    if isinstance(module, QuantMatMul):
        left, right = inputs
        yield module.left_quantizer, left / largest_of_rows(left) if module.rescales_rows else left
        yield module.right_quantizer, right
    else:
        assert isinstance(module, QuantizedLayer)
        yield module.input_quantizer, module.columns(inputs[0])


def _between_codes(quantizer: ActivationQuantizer, x: Tensor, scale: Tensor) -> int:
    """How many values lie between two codes of the range; beyond its ends nothing is decided."""
    steps = x / scale
    between = steps[(steps - steps.floor() - 0.5).abs_() < NEAR]
    return int(((between > -quantizer.zero_point) & (between < quantizer.levels - quantizer.zero_point)).sum())
