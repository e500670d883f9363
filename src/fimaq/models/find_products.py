"""Finding products of two activations: which modules make them, and whether one stayed in full precision."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fimaq.errors import InputError
from fimaq.models.products import (
    FUSED_ATTENTION,
    class_name,
    layer_read,
    linear_arguments,
    multiplied_activations,
    watched,
)
from fimaq.quant.layers import QUANTIZED, QuantMatMul


@contextmanager
def _running_module() -> Iterator[list[nn.Module]]:
    """A stack whose last element is the module whose forward is running."""
    stack: list[nn.Module] = []

    def leave(*_: Any) -> None:
        stack.pop()

    before = nn.modules.module.register_module_forward_pre_hook(lambda module, _: stack.append(module))
    after = nn.modules.module.register_module_forward_hook(leave, always_call=True)
    try:
        yield stack
    finally:
        before.remove()
        after.remove()


def count_products(model: nn.Module, run: Callable[[], Any]) -> dict[str, int]:
    """Module name -> how many products of two activations its forward makes during `run()`."""
    names = {id(m): name for name, m in model.named_modules()}
    counts: dict[str, int] = {}
    entered: dict[str, int] = {}

    def enter(module: nn.Module, _: Any) -> None:
        name = names.get(id(module), "")
        entered[name] = entered.get(name, 0) + 1

    def reads_a_layer(func: Any, args: Any, kwargs: Any) -> bool:
        return func is F.linear and layer_read(stack[-1], linear_arguments(*args, **(kwargs or {}))[1]) is not None

    class Counter(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = 2 if func is FUSED_ATTENTION else int(bool(multiplied_activations(func, args, kwargs)))
            if stack and (found or reads_a_layer(func, args, kwargs)):
                name = names.get(id(stack[-1]))
                if name is None:
                    kind = class_name(stack[-1])
                    raise InputError(
                        f"{kind} multiplies and is not among the model's modules: keep it in an nn.ModuleList "
                        "instead of a list"
                    )
                counts[name] = counts.get(name, 0) + found
            return func(*args, **(kwargs or {}))

    hook = nn.modules.module.register_module_forward_pre_hook(enter)
    try:
        with _running_module() as stack, Counter(), torch.no_grad():
            run()
    finally:
        hook.remove()
    for name in counts:
        if entered[name] > 1:
            raise InputError(f"{name} is used more than once in a forward pass, which is not supported")
    return counts


@dataclass(frozen=True)
class FloatProduct:
    """A matrix product or convolution that runs in full precision."""

    module: str
    kind: str
    operator: str

    def __str__(self) -> str:
        return f"{self.module or '(model)'} ({self.kind}): {self.operator}"


_HEAVY = {
    "mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "dot", "convolution", "linear",
    "_native_multi_head_attention", "_transformer_encoder_layer_fwd",
}  # fmt: skip


def float_products(model: nn.Module, run: Callable[[], Any]) -> list[FloatProduct]:
    """Every matrix product, convolution or fused attention that `run()` executes outside quantized layers.

    It looks at the operators below all Python code, so nothing escapes by being spelt differently.
    """
    names = {id(m): name for name, m in model.named_modules()}
    found: dict[FloatProduct, None] = {}

    class Watcher(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.overloadpacket.__name__
            heavy = name in _HEAVY or "scaled_dot_product" in name
            if heavy and stack and not any(isinstance(m, QUANTIZED) for m in stack):
                product = FloatProduct(names.get(id(stack[-1]), ""), class_name(stack[-1]), name)
                found.setdefault(product)
            return func(*args, **(kwargs or {}))

    with watched(model), _running_module() as stack, Watcher(), torch.no_grad():
        run()
    return list(found)


@torch.no_grad()
def softmax_products(model: nn.Module, run: Callable[[], Any]) -> list[str]:
    """Names of the QuantMatMuls whose left operand is the output of a softmax."""
    found: list[str] = []

    def look(name: str) -> Any:
        return lambda module, args: found.append(name) if are_probabilities(args[0]) else None

    hooks = [m.register_forward_pre_hook(look(n)) for n, m in model.named_modules() if isinstance(m, QuantMatMul)]
    try:
        with watched(model):
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return found


def are_probabilities(x: Tensor) -> bool:
    """True for the output of a softmax: rows that are not negative and sum to one."""
    sums = x.sum(-1)
    return bool((x >= 0).all()) and bool(torch.allclose(sums, torch.ones_like(sums), atol=1e-3))
