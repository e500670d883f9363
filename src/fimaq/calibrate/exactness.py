"""Where a quantized model can be made to compute the same bits in every library, and on which grids.

What is computed there is in quant/exact.py.

Looked for by running the model: LayerNorms over the last dimension, the layer in front of a GELU whose output is
quantized, and products that read a softmax. What is not recognised stays as it is.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fimaq.calibrate.ties import FACTORS
from fimaq.models.products import OpenedModule
from fimaq.quant.exact import (
    SIGNIFICAND,
    SOFTMAX_OFFSET,
    SOFTMAX_STEP,
    ExactLayerNorm,
    exact_layer_norm,
    offset_for,
    step_of,
)
from fimaq.quant.layers import QuantLinear, QuantMatMul
from fimaq.quant.quantizers import ActivationQuantizer

LARGEST_ERROR = 0.003
"""Of a LayerNorm's output, relative to its size: where a grid changes more than that, it is not taken."""
PARTS = 12
"""Into how many parts, at least, the grid before a GELU divides a step of the quantizer behind it."""
ULPS = 4
"""By how many last bits two libraries' exp may differ, and what goes into it."""
SATURATED = 8.0
"""Beyond it a GELU is zero on one side and its input on the other."""
MOST_POINTS = 2**18
"""Of a grid: with more, which scales of next to nothing have, some always lie between two codes."""
FINER = [1 + step * sign / 10_000 for step in range(51) for sign in (1, -1)][1:]
"""Changes of a scale behind a GELU that are tried, as `ties.FACTORS` but more: with 8 bits few are clear."""
CLEAR = 1.5e-6
"""How far from the middle between two codes a GELU must stay; libraries differ by less than a millionth."""


@torch.no_grad()
def find_exact(model: nn.Module, run: Callable[[], Any]) -> dict[str, float]:
    """Module -> offset of its grid; some scales are changed by thousandths. `run()` runs the quantized model."""
    offsets: dict[str, float] = {}
    names = {module: name for name, module in model.named_modules()}
    way: list[tuple[nn.Module, Tensor]] = []
    """The last two layers and GELUs that ran, with what they gave."""

    def after_norm(norm: nn.Module, args: Any, output: Tensor) -> None:
        offset = _layer_norm_offset(norm, args[0], output)  # type: ignore[arg-type]
        if offset is not None:
            offsets[names[norm]] = max(offset, offsets.get(names[norm], 0.0))

    def after_layer(module: nn.Module, args: Any, output: Tensor) -> None:
        if len(way) == 2 and isinstance(module, QuantLinear) and args[0] is way[1][1]:
            (first, given), (gelu, _) = way
            if isinstance(first, QuantLinear) and isinstance(gelu, nn.GELU) and entered.get(gelu) is given:
                offset = _gelu_offset(gelu, module.input_quantizer)
                if offset is not None:
                    offsets[names[first]] = offset
        if isinstance(module, nn.GELU):
            entered[module] = args[0]
        way[:] = [*way[-1:], (module, output)]

    entered: dict[nn.Module, Tensor] = {}
    hooks = [m.register_forward_hook(after_norm) for m in names if isinstance(m, nn.LayerNorm)]
    hooks += [m.register_forward_hook(after_layer) for m in names if isinstance(m, (nn.GELU, QuantLinear))]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    for module in names:
        for scores, weights in pairwise(module.products if isinstance(module, OpenedModule) else ()):
            assert isinstance(scores, QuantMatMul)
            assert isinstance(weights, QuantMatMul)
            if weights.rescales_rows:
                _avoid_ties_of_exp(scores.left_quantizer, scores.right_quantizer, weights.left_quantizer)
                offsets[names[weights]] = SOFTMAX_OFFSET
    return offsets


def _layer_norm_offset(norm: nn.LayerNorm, x: Tensor, output: Tensor) -> float | None:
    """A grid on which the squares of a usual token still sum up exactly; None where it would change the norm."""
    if len(norm.normalized_shape) != 1 or x.dtype != torch.float32 or isinstance(norm, ExactLayerNorm):
        return None
    width = norm.normalized_shape[0]
    plain = F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    if x.shape[-1] != width or output.shape != x.shape or not torch.allclose(plain, output, atol=1e-4, rtol=1e-3):
        return None
    size = float(x.square().mean(-1).sqrt().median())
    if size == 0 or not math.isfinite(size):
        return None
    offset = offset_for(2 * size * math.sqrt(width / 2**SIGNIFICAND))
    copy = nn.LayerNorm(norm.normalized_shape, norm.eps, elementwise_affine=False)
    exact_layer_norm(copy, offset)
    normalised = F.layer_norm(x, norm.normalized_shape, eps=norm.eps)
    error = (copy(x) - normalised).norm(dim=-1) / normalised.norm(dim=-1).clamp_min(1e-6)
    return offset if float(error.max()) < LARGEST_ERROR else None


def _avoid_ties_of_exp(query: ActivationQuantizer, key: ActivationQuantizer, softmax: ActivationQuantizer) -> None:
    """Change the query's scale a little if exponentials lie between two codes, or two points of their grid.

    Scores are whole numbers of steps, and so is what they are below the largest of their row.
    """

    def ties(factor: float) -> int:
        step = float(query.scale * factor * key.scale)
        powers = torch.exp(-step * torch.arange(0, 12 / step, dtype=torch.float64))
        found = 0
        for unit in (SOFTMAX_STEP, float(softmax.scale)):
            steps = powers / unit
            found += int(((steps - steps.floor() - 0.5).abs() * unit < ULPS * 2.0**-SIGNIFICAND * powers).sum())
        return found

    several = max(query.scale.numel(), key.scale.numel(), softmax.scale.numel()) > 1
    if not several and MOST_POINTS * float(query.scale * key.scale) > 12:
        query.set_range(query.scale * min(FACTORS, key=ties), query.zero_point)


def _gelu_offset(gelu: nn.Module, quantizer: ActivationQuantizer) -> float | None:
    """A grid of inputs on which no output lies close to the middle between two codes.

    The scale is changed by some thousandths where that is needed.
    """
    if quantizer.scale.numel() > 1:
        return None
    for factor in FINER:
        scale = quantizer.scale * factor
        offset = offset_for(float(scale) / PARTS)
        if _is_clear(gelu, scale.double().cpu(), quantizer, step_of(offset)):
            quantizer.set_range(scale, quantizer.zero_point)
            return offset
    return None


def _is_clear(gelu: nn.Module, scale: Tensor, quantizer: ActivationQuantizer, step: float) -> bool:
    zero_point = float(quantizer.zero_point)
    largest = max(SATURATED, (quantizer.levels - zero_point + 1) * float(scale))
    if not largest + SATURATED < MOST_POINTS * step:
        return False
    outputs = gelu(torch.arange(-SATURATED, largest, step, dtype=torch.float64)) / scale
    inside = (outputs > -zero_point) & (outputs < quantizer.levels - zero_point)
    from_middle = (outputs - outputs.floor() - 0.5).abs() * scale
    return bool((from_middle[inside] > CLEAR).all())
