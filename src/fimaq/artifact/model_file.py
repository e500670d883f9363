"""model.safetensors: packed integer weights, scales, zero points, and what stays in float.

For a quantized layer NAME the file holds NAME.weight.packed (see quant/packing.py), its scale and zero point
(NAME.weight_quantizer.*), those of its input (NAME.input_quantizer.*) and NAME.bias; for a product, those of
its two operands. Everything else is the model's own state under its own names.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fimaq.errors import InputError
from fimaq.quant.layers import quantized_layers, quantized_products
from fimaq.quant.packing import pack_bits, unpack_bits
from fimaq.quant.quantizers import Quantizer

PACKED = ".packed"


def quantized_state(module: nn.Module) -> dict[str, Tensor]:
    """Everything below a module whose layers are all hard, with integer weights packed."""
    state = {name: tensor.detach().cpu() for name, tensor in own_state(module).items()}
    for name, layer in quantized_layers(module):
        if layer.hard:
            weight = _join(name, "weight")
            del state[weight]
            state[weight + PACKED] = pack_bits(layer.codes.cpu(), layer.weight_quantizer.bits)
    for name, tensor in state.items():
        if name.endswith("_quantizer.zero_point"):
            state[name] = tensor.to(torch.uint8)
    return state


def load_quantized_state(module: nn.Module, state: dict[str, Tensor]) -> None:
    """The inverse of `quantized_state`, into a module prepared in the same way."""
    state = dict(state)
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    try:
        for name, part in module.named_modules():
            if isinstance(part, Quantizer):
                scale, zero_point = (state.pop(_join(name, key)).to(device) for key in ("scale", "zero_point"))
                if not (scale.numel() and scale.is_floating_point() and scale.isfinite().all()):
                    raise ValueError(f"{_join(name, 'scale')} does not hold finite numbers")
                torch.broadcast_shapes(scale.shape, zero_point.shape)
                part.set_range(scale, zero_point.to(scale.dtype))
        for name, layer in quantized_layers(module):
            bits, shape = layer.weight_quantizer.bits, layer.weight.shape
            _check_shapes(layer.weight_quantizer, (shape[0], *(1 for _ in shape[1:])), name)
            layer.set_codes(unpack_bits(state.pop(_join(name, "weight") + PACKED), bits, shape).to(device))
            bias = state.pop(_join(name, "bias"), None)
            if bias is None and layer.bias is not None:
                raise KeyError(f"{_join(name, 'bias')} is missing")
            if bias is not None and bias.shape != shape[:1]:
                raise ValueError(f"{_join(name, 'bias')} has shape {tuple(bias.shape)}, not {tuple(shape[:1])}")
            layer.bias = None if bias is None else nn.Parameter(bias.to(device), requires_grad=False)
        for _, product in quantized_products(module):
            product.quantized = True
        _load_rest(module, state)
    except (KeyError, ValueError, RuntimeError) as error:
        raise InputError(f"the stored weights do not fit this model: {error}") from None


def _check_shapes(quantizer: Quantizer, expected: tuple[int, ...], layer: str) -> None:
    """A scale of another shape might still broadcast against the weight, to wrong or huge results."""
    for key, tensor in (("scale", quantizer.scale), ("zero_point", quantizer.zero_point)):
        if tensor.shape != expected:
            raise ValueError(f"{key} of {layer}'s weight has shape {tuple(tensor.shape)}, not {expected}")


def _load_rest(module: nn.Module, state: dict[str, Tensor]) -> None:
    known = own_state(module)
    own: dict[str, Any] = {name: tensor for name, tensor in known.items() if not _is_quantized(module, name)}
    for name in module.state_dict().keys() - known.keys():  # earlier files have them
        state.pop(name, None)
    if own.keys() != state.keys():
        raise KeyError(f"names differ: {', '.join(sorted(own.keys() ^ state.keys())[:5])}")
    module.load_state_dict(state, strict=False)


def own_state(module: nn.Module) -> dict[str, Any]:
    """The module's state, without what a part has under a second name."""
    all_names, first_names = (
        {name for name, _ in module.named_modules(remove_duplicate=only_first)} for only_first in (False, True)
    )
    second = all_names - first_names
    return {name: t for name, t in module.state_dict().items() if name.rpartition(".")[0] not in second}


def _is_quantized(module: nn.Module, name: str) -> bool:
    """True for tensors that belong to a quantizer or to the weight and bias of a quantized layer."""
    owners = {n for n, _ in quantized_layers(module)}
    parent, _, last = name.rpartition(".")
    return "_quantizer." in f".{name}" or (last in ("weight", "bias") and parent in owners)


def _join(parent: str, child: str) -> str:
    return f"{parent}.{child}" if parent else child
