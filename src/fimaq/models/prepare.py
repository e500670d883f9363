"""From a trained model to one whose every heavy operator can be quantized, all quantizers still off."""

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fimaq.errors import InputError
from fimaq.models.find_products import FloatProduct, count_products, float_products, softmax_products
from fimaq.models.products import mark_nested, open_module, watched
from fimaq.quant.exact import exact_layer_norm
from fimaq.quant.layers import QuantLinear, QuantMatMul, can_convert, convert_layer, restore_layer

FIRST_LAYER_BITS = 8
"""The image itself is quantized to 8 bits whatever the setting: it arrives as bytes."""
SAME = 1e-2
"""Difference of two outputs, relative to their size, up to which they are the same but for tf32's digits."""
MOST_PRODUCTS = 256
"""In one module; a file that claims more is damaged."""


@dataclass(frozen=True)
class Structure:
    """What was changed in a model: enough to change a fresh copy of it in the same way."""

    layers: dict[str, tuple[int, int]]  # name -> (weight bits, input bits)
    products: dict[str, tuple[int, int]]  # name -> (how many, bits)
    stayed_float: list[str] = field(default_factory=list)
    rescaled: list[str] = field(default_factory=list)  # products whose rows are rescaled, see QuantMatMul
    divided: dict[str, dict[int, int]] = field(default_factory=dict)  # layer -> channel -> its columns
    exact: dict[str, float] = field(
        default_factory=dict
    )  # module -> offset of its grid, see calibrate/exactness.py

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Structure":
        """The inverse of `as_dict`, from a file: anything that `as_dict` would not give is a ValueError."""
        try:
            structure = cls._from_dict(values)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it has no such form ({type(error).__name__}: {error})") from None
        bits = [*itertools.chain(*structure.layers.values()), *(bits for _, bits in structure.products.values())]
        counts = [count for count, _ in structure.products.values()]
        columns = [count for channels in structure.divided.values() for count in channels.values()]
        if not all(2 <= number <= 8 for number in bits):
            raise ValueError("bits are not from 2 to 8")
        if not all(0 <= count <= MOST_PRODUCTS for count in counts) or not all(count >= 1 for count in columns):
            raise ValueError("a number of products or columns is not possible")
        if not all(0 < offset < math.inf for offset in structure.exact.values()):
            raise ValueError("an offset of a grid is not a positive number")
        return structure

    @classmethod
    def _from_dict(cls, values: dict[str, Any]) -> "Structure":
        return cls(
            {name: (int(w), int(a)) for name, (w, a) in values["layers"].items()},
            {name: (int(n), int(b)) for name, (n, b) in values["products"].items()},
            list(values["stayed_float"]),
            list(values["rescaled"]),
            {
                layer: {int(c): int(n) for c, n in columns.items()}
                for layer, columns in values.get("divided", {}).items()
            },
            {name: float(offset) for name, offset in values.get("exact", {}).items()},
        )


def prepare_model(
    model: nn.Module,
    example: Tensor,
    weight_bits: int,
    activation_bits: int,
    allow_float: bool = False,
    rescale_rows: bool = False,
) -> Structure:
    """Convert layers and open attention in place. `example`: a few images (n, C, H, W).

    With `rescale_rows`, products that read a softmax rescale its rows (see QuantMatMul).

    Raises InputError naming module and class where a product would stay in float, unless `allow_float`.
    """

    def run() -> Any:
        return model(example)

    try:
        with torch.no_grad():
            given, again = run(), run()
    except (RuntimeError, AssertionError, IndexError, ValueError, TypeError) as error:
        raise InputError(_not_taken(model, example, error)) from None
    if not _same(given, again):
        raise InputError(
            "the model gives something else each time: its forward keeps state or draws random numbers"
        )
    model.requires_grad_(False)
    untie(model)
    order = _layers_in_order(model, run)
    first_conv = next((name for name, layer in order.items() if isinstance(layer, nn.Conv2d)), None)
    first = first_conv if first_conv is not None and first_conv == next(iter(order)) else None
    layers = {
        name: (weight_bits, FIRST_LAYER_BITS if name == first else activation_bits)
        for name, layer in order.items()
        if can_convert(layer)
    }
    products = {name: (count, activation_bits) for name, count in count_products(model, run).items()}
    apply_structure(model, Structure(layers, products))
    left = float_products(model, run)
    uncalled = layers.keys() - _called(model, layers, run)
    if (left or uncalled) and not allow_float:
        raise InputError(_refusal(left))
    if products:
        _check_written_out(model, run, given)
        _check_operands(model, example)
    for name in uncalled:
        restore_layer(model.get_submodule(name))
        del layers[name]
    rescaled = softmax_products(model, run) if rescale_rows else []
    _rescale(model, rescaled)
    return Structure(layers, products, [str(product) for product in left], rescaled)


def _not_taken(model: nn.Module, example: Tensor, error: Exception) -> str:
    text = f"the model does not take images of shape {tuple(example.shape[1:])}: {error}"
    for kind in {p.dtype for p in model.parameters() if p.is_floating_point()} - {example.dtype}:
        text += f" (it has weights of type {kind}, images are {example.dtype}: model.float() converts it)"
    return text


@torch.no_grad()
def untie(model: nn.Module) -> None:
    """Give each module parameters of its own: what is quantized or folded in one must not change another."""
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if id(parameter) in seen and parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.clone(), requires_grad=False)
            seen.add(id(parameter))


def _same(one: Any, two: Any) -> bool:
    """Whether two results of a model are the same but for rounding."""
    for a, b in zip(tree_leaves(one), tree_leaves(two), strict=True):
        if not isinstance(a, Tensor) or not a.is_floating_point() or not a.isfinite().all():
            continue
        if not (b - a).double().norm() <= SAME * a.double().norm() + torch.finfo(torch.float32).tiny:
            return False
    return True


@torch.no_grad()
def _check_written_out(model: nn.Module, run: Callable[[], Any], given: Any) -> None:
    """Refuse a model that gives something else once its attention is written out as products."""
    with watched(model):
        found = run()
    if not _same(given, found):
        raise InputError(
            "attention written out as two products does not give what the model gives. It may have tokens that "
            "attend to nothing (a mask that leaves none), which is not supported"
        )


@torch.no_grad()
def _check_operands(model: nn.Module, example: Tensor) -> None:
    """Refuse products with an operand that is the same for all images: what is stored has a row per image."""
    sizes: dict[str, list[list[int]]] = {}

    def note(name: str) -> Any:
        return lambda module, args: sizes.setdefault(name, []).append([args[0].numel(), args[1].numel()])

    products = {name: m for name, m in model.named_modules() if isinstance(m, QuantMatMul)}
    hooks = [product.register_forward_pre_hook(note(name)) for name, product in products.items()]
    try:
        with watched(model):
            for images in (1, 2):
                model(example[:1].expand(images, *example.shape[1:]))
    finally:
        for hook in hooks:
            hook.remove()
    for name, calls in sizes.items():
        if len(calls) != 2 or calls[1] != [2 * size for size in calls[0]]:
            raise InputError(
                f"{name} multiplies something that is not there for each image, such as a table of positions, "
                "which is not supported"
            )


def apply_structure(model: nn.Module, structure: Structure) -> None:
    """Make in `model` the changes that `structure` records."""
    untie(model)
    modules = dict(model.named_modules())
    for name, (weight_bits, input_bits) in structure.layers.items():
        convert_layer(modules[name], weight_bits, input_bits)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    for name, (count, bits) in structure.products.items():
        open_module(modules[name], count, bits)
        modules[name].products.to(device)  # type: ignore[union-attr]
    mark_nested(model)
    _rescale(model, structure.rescaled)
    apply_findings(model, structure)


def apply_findings(model: nn.Module, structure: Structure) -> None:
    """Of the changes, those that calibration found: divided channels and grids."""
    for name, columns in structure.divided.items():
        model.get_submodule(name).divide(columns)  # type: ignore[operator]
    make_exact(model, structure.exact)


def make_exact(model: nn.Module, offsets: dict[str, float]) -> None:
    """Give LayerNorms, layers before a GELU and products of a softmax the grids that make them exact."""
    for name, offset in offsets.items():
        module = model.get_submodule(name)
        if isinstance(module, nn.LayerNorm):
            exact_layer_norm(module, offset)
        elif isinstance(module, QuantLinear):
            module.output_offset = offset
        else:
            assert isinstance(module, QuantMatMul)
            module.takes_exponentials = True


def _rescale(model: nn.Module, names: list[str]) -> None:
    for name in names:
        product = model.get_submodule(name)
        assert isinstance(product, QuantMatMul)
        product.rescales_rows = True


def _called(model: nn.Module, names: Iterable[str], run: Callable[[], Any]) -> set[str]:
    """Which of the layers are really called: torch's own MultiheadAttention reads a weight past its layer."""
    called: set[str] = set()
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(lambda m, a, name=name: called.add(name))  # type: ignore[misc]
        for name in names
    ]
    try:
        with watched(model), torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return called


def _layers_in_order(model: nn.Module, run: Callable[[], Any]) -> dict[str, nn.Module]:
    """Linear and Conv2d modules that take part in a forward pass, in the order they are first needed.

    A layer counts as used where its weight is: some models call F.linear with it, so hooks would miss it.
    """
    owners = {
        id(m.weight): (name, m)
        for name, m in model.named_modules()
        if isinstance(m, (nn.Linear, nn.Conv2d)) and "weight" in m._parameters
    }
    used: dict[str, nn.Module] = {}

    class Uses(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            for value in (*args, *(kwargs or {}).values()):
                if id(value) in owners and not _is_attribute_access(func):
                    name, module = owners[id(value)]
                    used.setdefault(name, module)
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Uses():
        run()
    return used


def _is_attribute_access(func: Any) -> bool:
    return getattr(func, "__name__", "") == "__get__"


def _refusal(left: list[FloatProduct]) -> str:
    shown = "; ".join(str(product) for product in left[:5])
    more = f"; and {len(left) - 5} more" if len(left) > 5 else ""
    return (
        f"cannot quantize every product of this model; these would stay in full precision: {shown}{more}. "
        "Supported are Linear, Conv2d with zero padding (both as PyTorch has them, with a weight of their own), "
        "and attention made of matmul or scaled_dot_product_attention. Give --allow-float to quantize the rest "
        "and list these as float."
    )
