"""Element-wise chains as one kernel each: on a GPU through torch.compile, on a CPU as they are written."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])


def fused_on_gpu(function: F) -> F:
    """Compile a function of tensors for CUDA arguments, once per shape. The first argument decides.

    Reconstruction is bound by memory traffic of such chains: written out, each operator reads and writes the
    whole tensor again.
    """
    compiled: list[Any] = []

    @functools.wraps(function)
    def call(first: Tensor, *rest: Any) -> Any:
        if not first.is_cuda:
            return function(first, *rest)
        if not compiled:
            torch._dynamo.config.cache_size_limit = max(64, torch._dynamo.config.cache_size_limit)
            compiled.append(torch.compile(function, dynamic=False))
        return compiled[0](first, *rest)

    return call  # type: ignore[return-value]
