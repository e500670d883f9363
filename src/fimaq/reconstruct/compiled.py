"""Running a function of named tensors many times: traced, compiled once for all units alike, replayed.

A reconstruction step is a few hundred small operators, and on a GPU it is bound by their launches and by memory
traffic. It is traced down to its operators (backward pass and optimisers included), compiled into fused kernels,
and recorded as one CUDA graph. Two units whose traces read the same share one compilation, and those that are
alike (`alike.py`) one trace; the compiler itself keeps its results on disk, so the next run starts at once.
"""

import copy
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fimaq.quant import window_attention
from fimaq.reconstruct.alike import tensor_kinds
from fimaq.reconstruct.cheaper import CHEAPER

Tensors = dict[str, Tensor]
Compiled = Callable[..., object]
Results = tuple[Tensor, ...]

WARM_UP = 3
"""Calls before a CUDA graph is recorded: libraries set themselves up during them."""

UNPADDED: dict[str, Any] = {"comprehensive_padding": False, "shape_padding": False}
"""The compiler makes no tensor larger to align it: it cannot keep reductions of such rows in registers, and copies
matrices to fill them up. Rows that need it are aligned already (`quant/aligned.py`)."""
COMBINED: dict[str, Any] = {"combo_kernels": True}
"""On a GPU, small kernels that do not wait for each other become one: 0.33 instead of 0.36 ms per step."""

_compiled: dict[str, Compiled] = {}
"""By what a trace reads like."""
_alike: dict[Hashable, Compiled] = {}
"""By the kind of what would be traced."""


class Replay:
    """Calls functions of named tensors, one after the other, which read and update them where they are.

    Each is compiled by itself: what one writes is in memory when the next reads it. `kind`: equal where functions
    of the same name do the same; None where that is not known.
    """

    def __init__(
        self, *parts: tuple[Callable[[Tensors], None], Tensors], compiled: bool, kind: Hashable = None
    ) -> None:
        self.on_gpu = any(_on_gpu(tensors) for _, tensors in parts)
        self.parts = [(*part, compile_function(*part, kind) if compiled else None) for part in parts]
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self.graph is None and self.on_gpu and self.calls == WARM_UP:
            self.graph = self._record()
        if self.graph is not None:
            self.graph.replay()
        else:
            self._run()
            self.calls += 1

    def _record(self) -> torch.cuda.CUDAGraph | None:
        """A CUDA graph of one call, which is not carried out; None where the function cannot be recorded."""
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL watches from another thread
                self._run()
        except Exception as error:  # a model may wait for the GPU in its forward, which no graph can hold
            torch.cuda.synchronize()
            warnings.warn(f"runs without a CUDA graph, and slower: {_first_line(error)}", stacklevel=2)
            return None
        return graph

    def _run(self) -> None:
        for function, tensors, fused in self.parts:
            if fused is not None:
                fused(*tensors.values())
            else:
                function(tensors)


class Recorded:
    """A function of tensors, replayed on a GPU for arguments shaped like the first; others run as they are.

    What it returns stays valid until the next call.
    """

    def __init__(self, function: Callable[..., Results]) -> None:
        self.function = function
        self.replay: Replay | None = None
        self.static: Tensors = {}
        self.results: list[Tensor] = []

    def __call__(self, *arguments: Tensor) -> Results:
        if self.replay is None:
            self.static = {str(i): t.clone() for i, t in enumerate(arguments)}
            self.replay = Replay((_storing(self.function, self.results), self.static), compiled=False)
        static = list(self.static.values())
        if not self.replay.on_gpu or [t.shape for t in static] != [t.shape for t in arguments]:
            return self.function(*arguments)
        torch._foreach_copy_(static, list(arguments))
        self.replay()
        return tuple(self.results)


def _storing(function: Callable[..., Results], results: list[Tensor]) -> Callable[[Tensors], None]:
    """`function`, with what it returns put into `results`.

    It must not refer to its user: in a cycle of references, a recorded graph and its gigabytes would stay alive
    until Python happens to look for cycles.
    """

    def run(tensors: Tensors) -> None:
        results[:] = function(*tensors.values())

    return run


def compile_function(
    function: Callable[[Tensors], None], tensors: Tensors, kind: Hashable = None
) -> Compiled | None:
    """The fused form of `function`, taking the values of `tensors`; None, with a warning, if there is none."""
    known = kind and (function.__qualname__, kind, tensor_kinds(tensors))
    if known in _alike:
        return _alike[known]
    try:
        traced = trace(function, tensors)
        if any(node.op == "get_attr" for node in traced.graph.nodes):
            # A tensor that is part of the graph, not an input, belongs to one unit alone.
            return _compile(traced, tensors)
        key = _description(traced, tensors)
        if key not in _compiled:
            _compiled[key] = _compile(traced, tensors)
    except Exception as error:  # whatever the compiler stumbles over, the plain function works
        warnings.warn(f"reconstruction runs uncompiled, and slower: {_first_line(error)}", stacklevel=2)
        return None
    if known:
        _alike[known] = _compiled[key]
    return _compiled[key]


def trace(function: Callable[[Tensors], None], tensors: Tensors) -> GraphModule:
    """All operators that `function` runs, as a graph over the values of `tensors`. Nothing is computed.

    For a GPU some are replaced by what takes fewer instructions, or less memory.
    """

    def on_values(*values: Tensor) -> tuple[()]:
        function(dict(zip(tensors, values, strict=True)))
        return ()

    on_gpu = _on_gpu(tensors)
    tracer = make_fx(on_values, CHEAPER if on_gpu else {}, tracing_mode="fake", _allow_non_fake_inputs=True)
    with window_attention.compiling_for_gpu(on_gpu):
        traced = tracer(*tensors.values())
    if window_attention.is_in(traced.graph) and not window_attention.kernel_works():
        return tracer(*tensors.values())
    return traced


def _compile(traced: GraphModule, tensors: Tensors) -> Compiled:
    """Fused kernels for a traced function. All shapes are fixed.

    The compiler stores its results on disk only where it was told of an environment for symbolic shapes; an
    empty one is enough.
    """
    if _on_gpu(tensors):
        try:
            return _compile_with(UNPADDED | COMBINED, copy.deepcopy(traced), tensors)
        except Exception as error:  # combining is young, and no reason to do without the rest
            warnings.warn(f"kernels are not combined: {_first_line(error)}", stacklevel=2)
    return _compile_with(UNPADDED, traced, tensors)


def _compile_with(options: dict[str, Any], traced: GraphModule, tensors: Tensors) -> Compiled:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    examples: list[Any] = [mode.from_tensor(t, static_shapes=True) for t in tensors.values()]
    with tracing(TracingContext(mode)):
        return torch._inductor.compile(traced, examples, options=options)


def _on_gpu(tensors: Tensors) -> bool:
    return any(t.is_cuda for t in tensors.values())


def _description(traced: GraphModule, tensors: Tensors) -> str:
    """Equal for two traces that one compilation serves: same operators, same kinds of tensors."""
    kinds = [f"{t.dtype} {tuple(t.shape)} {t.stride()} {t.device}" for t in tensors.values()]
    return "\n".join([traced.code, *kinds])


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
