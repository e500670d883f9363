"""The full-precision model with every equivalent change that the run made: the quantized model's twin.

A run folds LayerNorms and divides massive channels before it quantizes. Both leave the model's function as it is,
but a stored layer then expects other inputs than the original one: the last LayerNorm, say, lies outside of any
unit and is folded into the head. The twin has the same changes in float. Model and twin differ in nothing but
rounding, so that any layer or unit of one can take the place of its counterpart in the other.
"""

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from fimaq.calibrate.fold import SMALLEST_SPREAD, find_readers
from fimaq.errors import FimaqError
from fimaq.models.prepare import Structure, apply_structure
from fimaq.quant.layers import QuantLinear, quantized_layers

TOLERANCE = 1e-3
"""Largest relative change of the output by folding and dividing; what a fold itself is held to."""


@torch.no_grad()
def full_precision_twin(
    original: nn.Module, quantized: nn.Module, structure: Structure, example: Tensor
) -> nn.Module:
    """`original` with the run's changes, quantizers off. `example`: images (n, C, H, W); both models are kept.

    What each LayerNorm was divided by is read off the two models; which layers took the inverse is found by
    experiment, as when it was folded. No calibration image is needed.
    """
    twin = copy.deepcopy(original).eval()
    twin.requires_grad_(False)
    expected = twin(example)
    apply_structure(twin, replace(structure, divided={}, exact={}))
    stored = dict(quantized.named_modules())
    for name, norm in twin.named_modules():
        if isinstance(norm, nn.LayerNorm) and norm.weight is not None and norm.bias is not None:
            _fold_as_stored(twin, norm, stored[name], example)
    for name, layer in quantized_layers(twin):
        bias = stored[name].bias  # only a fold changes it, and weights and scales are all that is learned
        layer.bias = None if bias is None else _fixed(bias)
    for name, columns in structure.divided.items():
        linear = twin.get_submodule(name)
        assert isinstance(linear, QuantLinear)
        linear.divide(columns)
    change = float((twin(example) - expected).norm() / expected.norm().clamp_min(1e-30))
    if not change <= TOLERANCE:
        raise FimaqError(
            f"the run's folded LayerNorms change the full-precision model's output by {change:.2e} of its size, "
            f"more than {TOLERANCE:g}: units cannot be compared one by one"
        )
    return twin


def _fold_as_stored(twin: nn.Module, norm: nn.LayerNorm, stored: nn.Module, example: Tensor) -> None:
    """Fold one LayerNorm of the twin to what the run stored, if the run folded it."""
    weight, bias = stored.weight, stored.bias
    assert isinstance(weight, Tensor)
    assert isinstance(bias, Tensor)
    if torch.equal(weight, norm.weight) and torch.equal(bias, norm.bias):
        return
    readers = find_readers(twin, norm, example)
    # A channel whose weight is 0 is constant: its range is 0, and a fold takes the smallest spread for it.
    spread = torch.where(weight != 0, norm.weight / weight, torch.full_like(weight, SMALLEST_SPREAD))
    for reader in readers:
        reader.weight.data = reader.weight.data * spread
    norm.weight, norm.bias = _fixed(weight), _fixed(bias)


def _fixed(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach().clone(), requires_grad=False)
