"""Where a run computes, with what numerics, and how much memory it took there."""

import contextlib
import functools
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fimaq.config import Config
from fimaq.errors import FimaqError, InputError
from fimaq.ranks import ALONE, Ranks


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"device {name!r} is not known; accepted are auto, cpu and cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device {name!r} is not supported; accepted are auto, cpu and cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError("device 'cuda' was asked for, but this PyTorch sees no CUDA GPU; use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise InputError(f"device {name!r} is not there; accepted are cuda:0 to cuda:{last}, auto and cpu")
    return device


def with_precision(config: Config, device: torch.device) -> Config:
    """`config`, with the precision that it may leave open: the fastest that was seen to cost no accuracy.

    GPUs before NVIDIA's Ampere multiply neither in bf16 nor in tf32. One that is not there is taken to be newer.
    """
    if config.precision is not None:
        return config
    there = device.type == "cuda" and torch.cuda.is_available()
    old = device.type != "cuda" or (there and torch.cuda.get_device_capability(device) < (8, 0))
    usual = "tf32" if config.task == "detection" else "bf16"
    return config.model_copy(update={"precision": "fp32" if old else usual})


@contextlib.contextmanager
def numerics(config: Config, device: torch.device, ranks: Ranks = ALONE) -> Iterator[None]:
    """TF32 on a GPU as the precision says, the faster library on a CPU, and the same bits every time.

    Several ranks, and one process that shall have their bits, keep to PyTorch's usual library: with it, what comes
    of an image depends least on how many others are beside it.
    """
    cudnn = torch.backends.cudnn
    before = (cudnn.deterministic, cudnn.benchmark)
    cudnn.deterministic, cudnn.benchmark = True, False
    alone = ranks.size == 1 and config.parts in (None, 1)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.autocast(device.type, enabled=False))  # the caller's
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))  # what is asked of "the" GPU is asked of this one
                stack.enter_context(tf32(config.precision in ("tf32", "bf16")))
            if alone:
                stack.enter_context(fast_products(device))
            yield
    except torch.cuda.OutOfMemoryError as error:
        asked = f" within --memory-budget {config.memory_budget} bytes" if config.memory_budget else ""
        advice = (
            "a smaller --batch-size needs less" if asked else "--memory-budget, such as 4GiB, makes do with less"
        )
        raise FimaqError(f"out of GPU memory{asked}: {error}; {advice}. Finished units are kept") from None
    finally:
        cudnn.deterministic, cudnn.benchmark = before


@contextlib.contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Whether a GPU multiplies in TF32. PyTorch has two ways to say so, and refuses to mix them."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    libraries: list[Any] = [matmul, cudnn]
    name, value = "allow_tf32", allowed
    try:
        before = [library.allow_tf32 for library in libraries]
    except RuntimeError:  # the user has said it in the newer way
        libraries = [matmul, cudnn.conv, cudnn.rnn]  # type: ignore[attr-defined]
        name, value = "fp32_precision", "tf32" if allowed else "ieee"  # type: ignore[assignment]
        before = [library.fp32_precision for library in libraries]
    try:
        for library in libraries:
            setattr(library, name, value)
        yield
    finally:
        for library, old in zip(libraries, before, strict=True):
            setattr(library, name, old)


def fast_products(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Matrix products by the faster of two libraries, if the device is a CPU and it is as exact there."""
    return onednn() if device.type == "cpu" and onednn_is_exact() else contextlib.nullcontext()


@contextlib.contextmanager
def onednn() -> Iterator[None]:
    """Matrix products of a CPU by oneDNN. PyTorch's usual library takes half as long again on AMD's.

    That it may round to bf16 is how PyTorch is told to ask it at all; without instructions for that, it does not.
    It is told so in the older of two ways unless the user has used the newer one, after which the older is
    refused: a model's forward, or a compiler, may ask in that way meanwhile.
    """
    libraries = torch.backends.mkldnn.matmul, torch.backends.cuda.matmul  # type: ignore[attr-defined]
    before = [library.fp32_precision for library in libraries]
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:
        older = None
    try:
        if older is None:
            libraries[0].fp32_precision = "bf16"
        else:
            torch.set_float32_matmul_precision("medium")
        yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older)
        for library, old in zip(libraries, before, strict=True):
            library.fp32_precision = old


@functools.cache
def onednn_is_exact() -> bool:
    """Whether its products are as exact as single precision is, as where it cannot round to bf16 or tf32."""
    if not torch.backends.mkldnn.is_available():
        return False
    drawn = torch.Generator().manual_seed(0)
    kind: dict[str, Any] = {"generator": drawn, "dtype": torch.float32, "device": "cpu"}
    left, right = torch.randn(1024, 192, **kind), torch.randn(192, 384, **kind)
    exact = left.double() @ right.double()
    with onednn(), torch.autocast("cpu", enabled=False):
        return bool((left @ right - exact).norm() < 1e-5 * exact.norm())


def peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident_bytes() -> int:
    """What this process holds in the host's memory now."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):  # not Linux: the largest so far instead
        return peak_memory(torch.device("cpu"))
    return pages * resource.getpagesize()
