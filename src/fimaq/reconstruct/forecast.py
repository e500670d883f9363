"""Which activations a run will hold, where and when, told from the shapes of a few images.

`ActivationCache` decides where a list goes; `ForecastCache` lets it decide, and holds no memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fimaq.config import Config
from fimaq.models.units import UnitChain
from fimaq.reconstruct.cache import DISK, GPU, HOST, PINNED, ActivationCache
from fimaq.reconstruct.memory import looked_at, room_on_host
from fimaq.reconstruct.plan import images_for


@dataclass(frozen=True)
class Allocation:
    """One list of tensors that a run makes room for."""

    name: str
    size: int
    place: str


@dataclass
class Forecast:
    """Every list in the order of its allocation, and the most bytes held at once in each place.

    `while_learning`: for each unit, bytes held in each place while it is reconstructed.
    """

    allocations: list[Allocation] = field(default_factory=list)
    peaks: dict[str, int] = field(default_factory=dict)
    while_learning: list[dict[str, int]] = field(default_factory=list)

    @property
    def on_gpu(self) -> int:
        return self.peaks.get(GPU, 0)

    @property
    def on_host(self) -> int:
        """Pinned memory is rounded up by PyTorch to powers of two, and counted so."""
        return self.peaks.get(PINNED, 0) + self.peaks.get(HOST, 0)

    @property
    def on_disk(self) -> int:
        return self.peaks.get(DISK, 0)


class ForecastCache(ActivationCache):
    """Counts what an activation cache would hold. `free_memory`: bytes free before the run, by place."""

    def __init__(
        self, count: int, device: torch.device, config: Config, free_memory: dict[str, int], resident: int
    ) -> None:
        super().__init__(count, device, None, config.memory_budget, room_on_host(config.host_budget, resident))
        self.free_memory = free_memory
        self.forecast = Forecast()

    def allocate(self, name: str, rows: Sequence[Tensor], count: int | None = None) -> None:
        self.drop(name)
        images = self.count if count is None else count
        tensors = [torch.empty(images, *r.shape[1:], dtype=r.dtype, device="meta") for r in rows]
        size = sum(tensor.nbytes for tensor in tensors)
        place = next(self.places_for(size), DISK)
        self.places[name] = place
        self._tensors[name] = tensors
        self.forecast.allocations.append(Allocation(name, size, place))
        self.forecast.peaks[place] = max(self.forecast.peaks.get(place, 0), self.taken(place))

    def expect(self, name: str, rows: Sequence[Tensor], count: int | None = None) -> None:
        """As `write` of the first rows does: room is made for all images, or for `count`."""
        if name not in self._tensors:
            self.allocate(name, rows, count)

    def drop(self, name: str) -> None:
        self.places.pop(name, None)
        self._tensors.pop(name, None)

    def free(self, place: str) -> int:
        return max(0, self.free_memory[place] - self.taken(place))


@torch.no_grad()
def forecast_lists(
    chain: UnitChain,
    images: Tensor,
    config: Config,
    device: torch.device,
    free_memory: dict[str, int],
    resident: int = 0,
) -> Forecast:
    """What `Reconstruction` will hold for `config.calib_size` images on `device`, in its order.

    `images`: one or two, anywhere, only for their shapes. `device` need not exist. `resident`: bytes of the host
    that the process will take without lists.
    """
    cache = ForecastCache(config.calib_size, device, config, free_memory, resident)
    inputs, last = chain.first_inputs(images), len(chain) - 1
    outputs: dict[int, list[Tensor]] = {}

    def needed(index: int) -> int:
        return images_for(chain, index, config, config.calib_size, looked_at(images))

    cache.expect("teacher", [chain.model(images)])
    for prefix in ("raw", "quantized"):
        cache.expect(f"{prefix} inputs", inputs, needed(0))
    for index, unit in enumerate(chain.units):
        outputs[index] = unit(inputs)
        cache.expect("outputs", outputs[index], needed(index))
        if config.method == "brecq" and unit.reconstructed and index < last:
            cache.expect("gradients", [torch.cat([o.flatten(1) for o in outputs[index]], 1)])
        cache.forecast.while_learning.append({place: cache.taken(place) for place in (GPU, PINNED, HOST, DISK)})
        if index < last:
            inputs = chain.next_inputs(index, outputs[index], {i: outputs[i] for i in unit.carried})
            for prefix in ("raw", "quantized"):
                cache.expect(f"next {prefix}", inputs, needed(index + 1))
                if any(index in later.carried for later in chain.units):
                    cache.expect(f"{prefix} output {index}", outputs[index], needed(index + 1))
                cache.rename(f"next {prefix}", f"{prefix} inputs")
        for name in ("outputs", "gradients"):
            cache.drop(name)
        for earlier in unit.carried:
            if not any(earlier in later.carried for later in chain.units[index + 1 :]):
                cache.drop(f"raw output {earlier}")
                cache.drop(f"quantized output {earlier}")
    return cache.forecast
