"""How much memory a run may take on its device, and how that is shared out between caches and work.

A third of a budget is for cached activations; what does not fit there moves to the host or to disk. Another third
is for the longest suffix with its backward pass: so few images go through it at a time that it fits. The rest is
for the step itself, whose size the batch decides, and for the libraries. On a GPU the allocator enforces the
budget, so that it holds whatever the model does.

A budget for the host beside a GPU is for the whole process: two thirds of it hold the images, the libraries, and
lists that the GPU has no room for; one third is left for what a range search looks at.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from fimaq.fisher.divergence import kl_gradient
from fimaq.models.units import UnitChain

SWEEP = 64
"""Images of USUAL_PIXELS at a time when a unit or a suffix is run over the calibration set, if memory allows."""
CPU_SWEEP = 32
"""The same on a CPU, where more are slower: larger tensors are asked of the system, page by page, each time."""
USUAL_PIXELS = 384 * 384
SHARE = 1 / 3
HOST_SHARE = 2 / 3
LOOKED_AT = 32
"""Images whose values are looked at for ties, at most."""


def free_bytes(device: torch.device) -> int:
    """Memory that nothing uses at the moment."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return 4 * 2**30
    return 4 * 2**30


def room_on_host(budget: int | None, resident: int) -> int | None:
    """Bytes that lists may take beside a GPU, under a budget for a process that has `resident` without them."""
    return None if budget is None else max(0, int(HOST_SHARE * budget) - resident)


@contextmanager
def bounded(device: torch.device, budget: int | None) -> Iterator[None]:
    """On a GPU, keep what this process allocates within `budget` bytes; more is an out-of-memory error."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    if budget is None:
        yield
        return
    number = torch.cuda.current_device() if device.index is None else device.index
    total = torch.cuda.get_device_properties(number).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total), number)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, number)


def sweep_of(images: Tensor) -> int:
    """How many of these images (n, C, H, W) may be looked at together: fewer of large ones, a power of two."""
    fitting = SWEEP * USUAL_PIXELS // (images.shape[-2] * images.shape[-1])
    return min(SWEEP, 1 << max(0, fitting.bit_length() - 1))


def sweep_on(device: torch.device, images: Tensor) -> int:
    """How many of these images may run through a suffix and back together on this device, at most."""
    return sweep_of(images) if device.type == "cuda" else min(sweep_of(images), CPU_SWEEP)


def looked_at(images: Tensor) -> int:
    """How many of these images are looked at for ties: no more than can be looked at together."""
    return min(LOOKED_AT, sweep_of(images))


def affordable_sweep(chain: UnitChain, images: Tensor, budget: int | None) -> int:
    """How many images at a time may run through the longest suffix and back: a power of two, at most `sweep_on`.

    `images`: a few on the device, on which it is tried out. Without a budget, and on a CPU, always the same: the
    sums over images should not depend on what else happens to run on the machine.
    """
    most = sweep_on(images.device, images)
    if budget is None or not images.is_cuda:
        return most

    def gradients() -> None:
        with torch.no_grad():
            outputs, teacher = chain.units[0](chain.first_inputs(images)), chain.model(images)
        kl_gradient(lambda z: chain.suffix(0, z, {}), outputs, teacher)

    gradients()  # libraries take their own working memory on first use
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    gradients()
    needed = (torch.cuda.max_memory_allocated() - before) / len(images)
    # Twice: once for what is recorded as a CUDA graph and kept, once for a last, shorter batch.
    affordable = SHARE * (budget - before) / (2 * max(1.0, needed))
    return min(most, 1 << max(0, int(affordable).bit_length() - 1))
