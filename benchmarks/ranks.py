"""Speed of two CPU processes that quantize one model together, against one process on one core.

    torchrun --standalone --nproc-per-node 2 benchmarks/ranks.py --weights vit_tiny.safetensors --calib DIR

Every process is pinned to a core of its own and runs one thread. The first one also quantizes alone, with all
images, while the others wait; both take turns in one run, so that what else happens on the machine meets both.
Measured is one unit (the second block): steps, one Fisher refresh, range search. About two minutes.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fimaq.config import Config
from fimaq.data import build_transform, load_calibration, load_share, resolve_preprocessing
from fimaq.device import numerics
from fimaq.models.build import build_model
from fimaq.pipeline import even_out_channels, prepare_chain
from fimaq.ranks import ALONE, Ranks
from fimaq.reconstruct.algorithm import Reconstruction
from fimaq.reconstruct.cache import ActivationCache
from fimaq.reconstruct.step import ReconstructionStep
from fimaq.together import Together, joined_ranks

UNIT = 2
CPU = torch.device("cpu")


class Work:
    """One unit in work, by these ranks: what is measured of it."""

    def __init__(self, options: argparse.Namespace, config: Config, ranks: Ranks) -> None:
        model = build_model(options.model, options.weights)
        transform = build_transform(resolve_preprocessing(model, crop_pct=1.0))
        drawn = (options.calib, options.images, transform, 0)
        images = load_calibration(*drawn).images if ranks is ALONE else load_share(*drawn, ranks).images
        structure, chain = prepare_chain(model, ranks.ends(images), config)
        even_out_channels(model, structure, images, config, CPU, ranks)
        self.walk = Reconstruction(chain, images, config, ActivationCache(options.images, CPU, ranks=ranks))
        for earlier in range(UNIT):
            self.walk.cache_full_precision(earlier)
            self.walk.advance(earlier)
        self.walk.cache_full_precision(UNIT)
        self.seconds: dict[str, list[float]] = {"step": [], "refresh": [], "range search": []}
        self.time("range search", lambda: self.walk.search_ranges(chain.units[UNIT]))
        torch.manual_seed(0)
        objective = self.walk.objective(UNIT)
        self.step = ReconstructionStep(chain.units[UNIT], objective, config, self.walk.cache)
        self.time("refresh", lambda: self.walk.refresh(UNIT, objective, self.walk.evaluation(UNIT)))
        self.step()

    def time(self, what: str, function: Callable[[], Any], times: int = 1) -> None:
        began = time.perf_counter()
        function()
        self.seconds[what].append((time.perf_counter() - began) / times)

    def steps(self, times: int) -> None:
        self.time("step", lambda: [self.step() for _ in range(times)], times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--calib", type=Path, required=True)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4, help="in a round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = Config.create(
        calib_size=options.images, search_size=options.images, batch_size=options.batch_size, device="cpu"
    )
    with joined_ranks() as ranks, numerics(config, CPU, ranks):
        if not isinstance(ranks, Together):
            raise SystemExit("start it with torchrun --standalone --nproc-per-node 2")
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[ranks.local_rank % len(cores)]})
        ranks.place(CPU)
        alone = Work(options, config, ALONE) if ranks.rank == 0 else None
        ranks.sum_(torch.zeros(1))
        together = Work(options, config, ranks)
        for _ in range(options.rounds):
            if alone is not None:
                alone.steps(options.steps)
            ranks.sum_(torch.zeros(1))
            together.steps(options.steps)
        message = torch.zeros_like(together.step.tensors["bucket"])
        adding = [_seconds(ranks, message) for _ in range(20)]
        if alone is not None:
            print(json.dumps(_summary(alone, together, adding, message, ranks.size)))


def _seconds(ranks: Ranks, message: Tensor) -> float:
    """Of adding up one message that all ranks are ready for."""
    ranks.sum_(torch.zeros(1))
    began = time.perf_counter()
    ranks.sum_(message)
    return time.perf_counter() - began


def _summary(alone: Work, together: Work, adding: list[float], message: Tensor, size: int) -> dict[str, Any]:
    one = {what: statistics.median(values) for what, values in alone.seconds.items()}
    all_ranks = {what: statistics.median(values) for what, values in together.seconds.items()}
    return {
        "ranks": size,
        "ms per step alone": [round(1000 * value, 1) for value in alone.seconds["step"]],
        "ms per step together": [round(1000 * value, 1) for value in together.seconds["step"]],
        "times as fast": {what: round(one[what] / all_ranks[what], 2) for what in one},
        "seconds alone": {what: round(value, 3) for what, value in one.items()},
        "ms to add up gradients": round(1000 * statistics.median(adding), 2),
        "share of a step": round(statistics.median(adding) / all_ranks["step"], 4),
        "message bytes": message.nbytes,
        "loss alone, together": [alone.step.loss, together.step.loss],
    }


if __name__ == "__main__":
    main()
