"""Times on the CPU at hand: a few real pieces of the run are done on random images, and the rest is counted.

Pieces are the range search, one refresh and two steps of one unit of each kind that makes up much of the model.
They are the run's own functions; nothing is stored. Other units are told by their operations.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fimaq.config import Config
from fimaq.models.units import UnitChain
from fimaq.reconstruct.algorithm import Reconstruction
from fimaq.reconstruct.cache import ActivationCache
from fimaq.reconstruct.plan import UnitPlan
from fimaq.reconstruct.step import ReconstructionStep

COVERED = 0.9
"""Kinds of units are timed until they make up this share of the model's operations."""
TIMED_STEPS = 2
PASSES = 5
"""Forward passes of the model over all images beside steps and refreshes: teacher, outputs, and what they become
once quantized, which takes about twice as long, and again at the end."""
SEARCH_PASSES = 3
"""The same over the images of the range search: LayerNorm folding and massive channels."""


def stage_seconds(chain: UnitChain, images: Tensor, plans: Sequence[UnitPlan], config: Config) -> dict[str, float]:
    """Seconds of a whole run by stage. `images`: as many as a batch (n, C, H, W). The model is used up."""
    with torch.random.fork_rng(devices=[]):
        return _Timing(chain, images, plans, config).stages()


class _Timing:
    def __init__(self, chain: UnitChain, images: Tensor, plans: Sequence[UnitPlan], config: Config) -> None:
        self.chain, self.plans, self.config, self.images = chain, plans, config, images
        self.count = len(images)
        # The rank keeps its meaning: that many refreshes must find room in the objective.
        self.walk = Reconstruction(
            chain,
            images,
            config.model_copy(update={"calib_size": self.count}),
            ActivationCache(self.count, images.device),
        )
        self.search: dict[float, float] = {}
        self.refresh: dict[float, float] = {}
        self.steps: dict[float, float] = {}

    def stages(self) -> dict[str, float]:
        with torch.no_grad():
            self.chain.model(self.images[:1])
            forward = _timed(lambda: self.chain.model(self.images)) / self.count
        chosen = _chosen(self.plans)
        for index in range(max(chosen) + 1):
            self.walk.cache_full_precision(index)
            if index in chosen:
                self._time(index)
                # What was quantized would only slow the walk to the next unit down.
                self.walk.cache.drop("gradients")
            self.walk.advance(index)
        self.walk.cache.close()
        looked_at = min(self.config.search_size, self.config.calib_size)
        passes = PASSES * self.config.calib_size + SEARCH_PASSES * looked_at
        share = min(self.config.fisher_size or self.config.calib_size, self.config.calib_size) / self.count
        return {
            "setup": forward * passes,
            "range search": sum(_told(self.search, p.size) for p in self.plans),
            "refreshes": share * sum(p.refreshes * _told(self.refresh, p.refresh_size) for p in self.plans),
            "steps": sum(p.iterations * _told(self.steps, p.size) for p in self.plans),
            "compilation": 0.0,
        }

    def _time(self, index: int) -> None:
        """Search, refresh and steps of one unit, whose full-precision outputs are cached."""
        walk, plan, unit = self.walk, self.plans[index], self.chain.units[index]
        self.search[plan.size] = self._search_seconds(unit)
        if not plan.iterations:
            return
        objective = walk.objective(index)
        step = ReconstructionStep(unit, objective, walk.config, walk.cache)
        if plan.refreshes:
            evaluate = walk.evaluation(index)
            self.refresh[plan.refresh_size] = _timed(lambda: walk.refresh(index, objective, evaluate))
        step()
        self.steps[plan.size] = _timed(step, TIMED_STEPS)
        step.finish()

    def _search_seconds(self, unit: Any) -> float:
        """Of all images that the search will look at: part of its time is in proportion to them, part fixed."""
        many = min(self.config.search_size, self.config.calib_size)
        most = min(self.count, many)
        few = max(1, most // 2)
        original, times = self.walk.config, {}
        for count in dict.fromkeys((few, most)):
            self.walk.config = original.model_copy(update={"search_size": count})
            times[count] = _timed(lambda: self.walk.search_ranges(unit))
        self.walk.config = original
        if few == most:
            return times[most]
        slope = max(0.0, times[most] - times[few]) / (most - few)
        return times[most] + slope * (many - most)


def _chosen(plans: Sequence[UnitPlan]) -> list[int]:
    """The first unit, whose kind is its own, and the first of each kind until enough operations are covered."""
    by_size: dict[float, list[int]] = {}
    for index, plan in enumerate(plans):
        by_size.setdefault(plan.size, []).append(index)
    total = sum(plan.size for plan in plans)
    chosen, covered = {0}, 0.0
    for size, members in sorted(by_size.items(), key=lambda item: -item[0] * len(item[1])):
        if covered >= COVERED * total:
            break
        chosen.add(members[0])
        covered += size * len(members)
    return sorted(chosen)


def _told(times: dict[float, float], size: float) -> float:
    """The time of the measured piece nearest in size, in proportion."""
    if not times:
        return 0.0
    nearest = min(times, key=lambda known: abs(known - size))
    return times[nearest] * size / nearest


def _timed(function: Callable[[], Any], times: int = 1) -> float:
    """Seconds of one call, on average."""
    began = time.perf_counter()
    for _ in range(times):
        function()
    return (time.perf_counter() - began) / times
