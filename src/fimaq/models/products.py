"""Opening attention up: routing every product of two activations through a QuantMatMul.

No attention class is known by name. A probe run sees which modules multiply activations (`find_products.py`); each
of them gets its own forward back under a torch-function mode that hands its first product to `products[0]`, its
second to `products[1]`, and writes a fused `scaled_dot_product_attention` out into these two. So timm's ViT, Swin,
BEiT, EVA, CaiT and whatever comes next are opened by the same code, and a second look at the operators that really
run (`float_products`) proves that nothing was left out.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fimaq.errors import InputError
from fimaq.quant.aligned import spare_tokens, unbind
from fimaq.quant.exact import exponentials
from fimaq.quant.layers import QuantLinear, QuantMatMul
from fimaq.quant.window_attention import attention_at_once

MATMULS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}
FUSED_ATTENTION = F.scaled_dot_product_attention
_SOFTMAXES = {F.softmax, torch.softmax, Tensor.softmax}

_UNBINDS = {torch.unbind, Tensor.unbind}

_innermost: ContextVar["OpenedModule | None"] = ContextVar("innermost", default=None)
"""Of the nested opened modules that run, the one that was called last: what is multiplied now is its."""


def _softmax(scores: Tensor) -> Tensor:
    return scores.softmax(dim=-1)


def written_out_attention(
    products: tuple[Callable[..., Tensor], Callable[[Tensor, Tensor], Tensor]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    softmax: Callable[[Tensor], Tensor] = _softmax,
    at_once: Callable[..., Tensor | None] | None = None,
) -> Tensor:
    """scaled_dot_product_attention as two products with a softmax between. Shapes: (..., tokens, head_dim).

    The scale is applied to the query before the product, where integer runtimes expect it. While a GPU learns, the
    keys get `spare` more tokens of zeros that nothing attends to. What `at_once` gives for query, key, value, mask
    and scale, if anything, takes the place of it all.
    """
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    if at_once is not None and not (dropout_p > 0 or is_causal or enable_gqa):
        attended = at_once(query, key, value, attn_mask, scale)
        if attended is not None:
            return attended
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    query = query * scale
    spare = spare_tokens(key)
    scores = products[0](query, key.transpose(-2, -1), *([spare] if spare else []))
    if is_causal:
        attn_mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=scores.device).tril()
    if spare:
        attn_mask = _with_spare(attn_mask, key.size(-2), spare, scores)
    if attn_mask is not None:
        is_filter = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if is_filter else scores + attn_mask
    weights = softmax(scores)
    return products[1](F.dropout(weights, dropout_p) if dropout_p > 0 else weights, value)


def _with_spare(attn_mask: Tensor | None, tokens: int, spare: int, scores: Tensor) -> Tensor:
    """What to add to scores (..., n, tokens + spare), so that the spare tokens get no attention."""
    if attn_mask is None:
        attn_mask = scores.new_zeros(tokens)
    elif attn_mask.dtype == torch.bool:
        attn_mask = scores.new_zeros(()).masked_fill(~attn_mask, -math.inf)
    return F.pad(attn_mask.expand(*attn_mask.shape[:-1], tokens), (0, spare), value=-math.inf)


class _PowersAndSums(torch.autograd.Function):
    """Scores (..., n, k) -> exp(score - largest of its row), and sums (..., n, 1). Their quotient is the softmax.

    Gradients are those of the softmax times its sums, which count as constant: what scales a row of a quantized
    softmax must not learn, or adding a constant to all scores of a row would seem to change something.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor) -> tuple[Tensor, Tensor]:
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        powers = torch.exp(wide - wide.amax(-1, keepdim=True))
        sums = powers.sum(-1, keepdim=True)
        ctx.save_for_backward(powers, sums)
        ctx.mark_non_differentiable(sums)
        return powers, sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        powers, sums = ctx.saved_tensors
        weighted = grads[0] * powers
        return weighted - powers * (weighted.sum(-1, keepdim=True) / sums)


class _UnbindMode(TorchFunctionMode):
    """Lets gradients of what is unbound lie in memory as it does (`quant/aligned.py`)."""

    unbound: tuple[Tensor, tuple[Tensor, ...]] | None = None
    """What was last unbound over its first dimension, and its parts."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _UNBINDS and args and args[0].requires_grad:
            return self._unbind(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _unbind(self, x: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
        parts = unbind(x, dim)
        self.unbound = (x, parts) if dim % x.dim() == 0 else None
        return parts


class _ProductMode(_UnbindMode):
    """Hands products of activations, in the order they are met, to the owner's `products`."""

    def __init__(self, owner: "OpenedModule") -> None:
        self.owner = owner
        self.count = 0
        self.softmax: tuple[Tensor, Tensor, Tensor] | None = None
        """The last one, and the exponentials and sums that it is made of."""

    def _multiply(self, left: Tensor, right: Tensor, spare: int = 0) -> Tensor:
        self.count += 1
        product = self.owner.products[self.count - 1]
        if self.softmax is not None and left is self.softmax[0]:
            return product(self.softmax[1], right, sums=self.softmax[2])
        return product(left, right, spare=spare)

    def _attend_at_once(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, factor: float
    ) -> Tensor | None:
        """A whole attention by one kernel, where there is one; else nothing has happened."""
        whole, parts = self.unbound or (None, ())
        of_one = len(parts) == 3 and query is parts[0] and key is parts[1] and value is parts[2]
        if whole is None or not of_one:
            return None
        scores, weighted = self.owner.products[self.count : self.count + 2]
        assert isinstance(scores, QuantMatMul)
        assert isinstance(weighted, QuantMatMul)
        attended = attention_at_once(scores, weighted, whole, bias, factor)
        self.count += 0 if attended is None else 2
        return attended

    def _softmax(self, scores: Tensor) -> Tensor:
        reads_it = self.owner.products[self.count] if self.count < len(self.owner.products) else None
        learns = scores.requires_grad
        if not isinstance(reads_it, QuantMatMul) or not reads_it.wants_exponentials(learns):
            return _softmax(scores)
        powers, sums = _PowersAndSums.apply(scores) if learns else exponentials(scores)
        self.softmax = powers / sums, powers, sums
        return self.softmax[0]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.owner.nested and _innermost.get() is not self.owner:
            return super().__torch_function__(func, types, args, kwargs)
        if operands := multiplied_activations(func, args, kwargs):
            return self._multiply(*operands)
        if func is FUSED_ATTENTION:
            own = {"softmax": self._softmax, "at_once": self._attend_at_once}
            return written_out_attention((self._multiply, self._multiply), *args, **{**kwargs, **own})
        if func in _SOFTMAXES and _is_over_last(*args, **kwargs):
            return self._softmax(args[0] if args else kwargs["input"])
        if func is F.linear:
            x, weight, bias = linear_arguments(*args, **kwargs)
            layer = layer_read(self.owner, weight)
            if isinstance(layer, QuantLinear):
                return layer(x, bias)
        return super().__torch_function__(func, types, args, kwargs)


def layer_read(module: nn.Module, weight: Tensor) -> nn.Linear | None:
    """The layer of a module that has this weight.

    BEiT, EVA and Swin-V2 call F.linear with the weight of a layer and a bias they put together.
    """
    return next((m for m in module.children() if isinstance(m, nn.Linear) and m.weight is weight), None)


def linear_arguments(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


def _is_over_last(input: Tensor, dim: int | None = None, *options: Any, **others: Any) -> bool:
    """Whether these are the arguments of a plain softmax over the last dimension."""
    converts = any(isinstance(option, torch.dtype) for option in (*options, *others.values()))
    return dim in (-1, input.dim() - 1) and not converts


def multiplied_activations(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> tuple[Any, ...]:
    """The operands of a product of two activations; nothing where `func` is something else."""
    kwargs = kwargs or {}
    named = {"input", "other", "mat2"} & kwargs.keys()
    operands = (*args, *(kwargs[name] for name in sorted(named)))  # in the order of their places
    is_product = func in MATMULS and len(operands) == 2 and len(named) == len(kwargs)
    return operands if is_product and not any(isinstance(o, nn.Parameter) for o in operands) else ()


def _learns_on_gpu(args: tuple[Any, ...]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.is_cuda for a in args)


class OpenedModule(nn.Module):
    """Mixed into the class of a module whose products are quantized (see `open_module`).

    While its quantizers are off and nobody watches, the module runs as it was written: fused and faster.
    """

    products: nn.ModuleList
    watched = False
    nested = False
    """Whether it holds another one, or is held by one. Others are spared what compilers do not understand."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.nested:
            return self._run(*args, **kwargs)
        outer = _innermost.set(self)
        try:
            return self._run(*args, **kwargs)
        finally:
            _innermost.reset(outer)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if not self.watched and self._runs_as_written():
            with _UnbindMode() if _learns_on_gpu(args) else nullcontext():
                return super().forward(*args, **kwargs)
        mode = _ProductMode(self)
        if _learns_on_gpu(args) and getattr(self, "fused_attn", None) is False:
            result = self._run_fused(mode, *args, **kwargs)
        else:
            with mode:
                result = super().forward(*args, **kwargs)
        if mode.count != len(self.products):
            expected = len(self.products)
            raise InputError(
                f"{class_name(self)} made {mode.count} products of activations where {expected} were expected: "
                "a module used more than once, or whose products depend on its input, is not supported"
            )
        return result

    def _runs_as_written(self) -> bool:
        """No quantizer is on, and no layer, whose weight the module may read past it, is divided into columns."""
        layers = [m for m in self.children() if isinstance(m, QuantLinear)]
        quantized = any(m.quantized for m in (*self.products, *layers))
        return not quantized and all(layer.shares is None for layer in layers)

    def _run_fused(self, mode: _ProductMode, *args: Any, **kwargs: Any) -> Any:
        """timm's Swin multiplies by itself unless told to call the fused attention, whose rows can be aligned."""
        self.fused_attn = True
        try:
            with mode:
                return super().forward(*args, **kwargs)
        finally:
            self.fused_attn = False


def open_module(module: nn.Module, count: int, bits: int) -> None:
    """Give `module` `count` quantized products, in place, quantizers off."""
    module.products = nn.ModuleList(QuantMatMul(bits) for _ in range(count))
    kind: Any = type(module)
    module.__class__ = _opened(kind)


@cache
def _opened(kind: type) -> Any:
    """One class for all modules of a class, so that it shows which are alike."""
    return type(f"Opened{kind.__name__}", (OpenedModule, kind), {"__module__": kind.__module__})


def mark_nested(model: nn.Module) -> None:
    """Let opened modules know if one runs within another."""
    opened = [m for m in model.modules() if isinstance(m, OpenedModule)]
    for outer in opened:
        for inner in outer.modules():
            if inner is not outer and isinstance(inner, OpenedModule):
                outer.nested = inner.nested = True


def class_name(module: nn.Module) -> str:
    """The name that the user knows a module's class by."""
    kind = type(module)
    return kind.__bases__[1].__name__ if isinstance(module, OpenedModule) else kind.__name__


@contextmanager
def watched(model: nn.Module) -> Iterator[None]:
    """Products go through their QuantMatMul even while quantizers are off, so that hooks see them."""
    opened = [m for m in model.modules() if isinstance(m, OpenedModule)]
    for module in opened:
        module.watched = True
    try:
        yield
    finally:
        for module in opened:
            module.watched = False
