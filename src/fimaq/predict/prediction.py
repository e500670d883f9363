"""A run's time and memory before it starts: what lists it will hold, fitted or timed pieces, and their sum."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from fimaq.calibrate.search import CHUNK_ELEMENTS
from fimaq.checks import check_learnable
from fimaq.config import FISHER_METHODS, Config
from fimaq.device import numerics, with_precision
from fimaq.models.build import build_architecture
from fimaq.models.units import UnitChain
from fimaq.pipeline import prepare_chain
from fimaq.predict import fitted, timed
from fimaq.predict.sizes import Sizes, count_sizes
from fimaq.reconstruct.cache import GPU, HOST, PINNED
from fimaq.reconstruct.forecast import Forecast, forecast_lists
from fimaq.reconstruct.memory import SHARE, free_bytes, sweep_on
from fimaq.reconstruct.plan import UnitPlan, plan

GIBIBYTE = 2**30
CPU_LIBRARIES = 0.6 * GIBIBYTE
"""What a process takes with PyTorch loaded, before there is a model."""
CPU_REST = 0.32 * GIBIBYTE
SEARCH_COPIES, SEARCH_CANDIDATES = 6, 88
"""Tensors of its largest size that a range search holds, and candidates it tries together if they are small."""
COPIES = 3
"""Of the weights on the host: the model, the one that is quantized, and the roundings and gradients of a unit."""
H200_BYTES = 139 * GIBIBYTE


@dataclass(frozen=True)
class Prediction:
    """What a run is expected to take. `basis`: where the times come from."""

    model: str
    device: str
    precision: str
    basis: str
    seconds: dict[str, float]
    gpu_bytes: int
    host_bytes: int
    disk_bytes: int
    lists: dict[str, int]
    """Cached activations: the most bytes held at once, by place."""

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "total_seconds": self.total_seconds}


def predict(config: Config, image_shape: tuple[int, ...], devices: Sequence[torch.device]) -> list[Prediction]:
    """What `config` will take on each of `devices`, which need not be there: a GPU is predicted as an H200.

    Weights are random, images too; neither changes time or memory, but for massive channels, which only trained
    weights have. On a CPU pieces of the run are timed.
    """
    assert config.model is not None
    with torch.random.fork_rng(devices=[]), numerics(config, torch.device("cpu")):
        torch.manual_seed(0)
        model = build_architecture(config.model, config.num_classes, config.model_args)
        example = torch.randn(2, *image_shape)
        chain = prepare_chain(model, example, config)[1]
        check_learnable(chain, example, config)
        sizes = count_sizes(chain, torch.randn(2, *image_shape), config.weight_bits)
        found = [predict_on(device, chain, sizes, config) for device in devices]
        if any(device.type == "cpu" for device in devices):
            batch = torch.randn(config.batch_size, *image_shape)
            timings = timed.stage_seconds(chain, batch, plans_of(sizes, config), config)  # uses the model up
            found = [one if one.seconds else replace(one, seconds=timings) for one in found]
    return found


def predict_on(device: torch.device, chain: UnitChain, sizes: Sizes, config: Config) -> Prediction:
    """The same for a model whose sizes are counted; without seconds for a CPU."""
    config = with_precision(config, device)
    image = torch.randn(1, *chain.image_shape)
    on_gpu = device.type == "cuda"
    resident = int(fitted.HOST_LIBRARIES + _kept(sizes, config)) if on_gpu else 0
    lists = forecast_lists(chain, image, config, device, free_memory(device), resident)
    sweep = _sweep(sizes, config, device, sweep_on(device, image))
    return Prediction(
        model=str(config.model),
        device=str(device),
        precision=str(config.precision),
        basis="fitted to an NVIDIA H200" if on_gpu else "timed on this machine",
        seconds=fitted.stage_seconds(sizes, plans_of(sizes, config), config) if on_gpu else {},
        gpu_bytes=_gpu_bytes(sizes, lists, sweep, config) if on_gpu else 0,
        host_bytes=_host_bytes(sizes, lists, sweep, config, device),
        disk_bytes=2 * sizes.packed_bytes + lists.on_disk,  # the finished model beside its checkpoint
        lists=dict(lists.peaks),
    )


def plans_of(sizes: Sizes, config: Config) -> list[UnitPlan]:
    units = sizes.units
    return plan([u.operations for u in units], [u.reconstructed for u in units], config)


def free_memory(device: torch.device) -> dict[str, int]:
    """Bytes free in each place; an H200's where there is no GPU."""
    host = free_bytes(torch.device("cpu"))
    there = device.type == "cuda" and torch.cuda.is_available()
    return {GPU: free_bytes(device) if there else H200_BYTES, PINNED: host, HOST: host}


def _sweep(sizes: Sizes, config: Config, device: torch.device, most: int) -> int:
    """Images that go through a suffix at a time; with a budget on a GPU so few that their backward pass fits."""
    most = min(most, config.calib_size)
    if config.memory_budget is None or device.type != "cuda":
        return most
    room = SHARE * (config.memory_budget - sizes.model_bytes) / (2 * max(1, sizes.suffix_saved))
    return min(most, 1 << max(0, int(max(0.0, room)).bit_length() - 1))


def _gpu_bytes(sizes: Sizes, lists: Forecast, sweep: int, config: Config) -> int:
    held = [places[GPU] for places in lists.while_learning]
    return int(fitted.gpu_bytes(sizes, lists.on_gpu, held, sweep, _refreshed(config), config))


def _host_bytes(sizes: Sizes, lists: Forecast, sweep: int, config: Config, device: torch.device) -> int:
    """The process itself, copies of the model, the images, lists, and on a CPU the work."""
    kept = _kept(sizes, config)
    looked_at = min(config.search_size, config.calib_size) * max(unit.recorded for unit in sizes.units)
    if device.type == "cuda":
        bounded = fitted.RECORDED_COPIES * looked_at if config.memory_budget is not None else 0
        return int(fitted.HOST_LIBRARIES + kept + lists.on_host + bounded)
    suffixes = [sweep * sizes.saved_behind(i) if _refreshed(config) else 0.0 for i in range(len(sizes.units))]
    working = [
        held[HOST] + max(suffix, looked_at) for held, suffix in zip(lists.while_learning, suffixes, strict=True)
    ]
    tried = SEARCH_COPIES * min(4 * CHUNK_ELEMENTS["cpu"], SEARCH_CANDIDATES * looked_at) + looked_at
    return int(CPU_LIBRARIES + CPU_REST + tried + kept + max(lists.on_host, *working))


def _kept(sizes: Sizes, config: Config) -> float:
    """On the host all the time: copies of the model, and the images."""
    return COPIES * sizes.model_bytes + config.calib_size * sizes.image_bytes


def _refreshed(config: Config) -> bool:
    return config.method in FISHER_METHODS
