"""What a run has ahead of it, unit by unit, so that the time it will take can be told early.

Units differ in cost by orders of magnitude, and a Fisher refresh at the first block runs through all later ones.
Both show in the operations of a forward pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fimaq.config import FISHER_METHODS, Config
from fimaq.models.products import watched
from fimaq.models.units import UnitChain
from fimaq.pace import Part

SEARCH, FIRST_STEP, REFRESH, STEPS = "range search", "first step", "refresh", "reconstruction"


@dataclass(frozen=True)
class UnitPlan:
    """What one unit takes: its range search, so many refreshes and so many steps. Sizes are in operations."""

    size: float
    refresh_size: float
    refreshes: int
    iterations: int

    @property
    def search(self) -> Part:
        return Part(SEARCH, self.size)

    def refresh(self, count: int) -> Part:
        return Part(REFRESH, self.refresh_size, count)

    def steps(self, count: int) -> Part:
        return Part(STEPS, self.size, count)

    def rest(self, searched: bool, refreshes: int, iterations: int) -> list[Part]:
        """What is left once so much is done."""
        parts = [self.refresh(self.refreshes - refreshes), self.steps(self.iterations - iterations)]
        if not searched:
            parts.append(self.search)
        return parts


@torch.no_grad()
def unit_operations(chain: UnitChain, images: Tensor) -> list[int]:
    """Floating point operations of each unit in one forward pass over `images` (n, C, H, W).

    Attention as its two products: PyTorch 2.11 does not count a fused one on a CPU.
    """
    with watched(chain.model), FlopCounterMode(display=False) as counter:
        chain.model(images)
    counts, root = counter.get_flop_counts(), type(chain.model).__name__
    return [sum(counts.get(f"{root}.{unit.name}", {}).values()) for unit in chain.units]


def plan(operations: Sequence[int], reconstructed: Sequence[bool], config: Config) -> list[UnitPlan]:
    """One entry for each unit. A refresh runs through the unit once, and to and fro through what follows it."""
    plans: list[UnitPlan] = []
    for index, (own, learned) in enumerate(zip(operations, reconstructed, strict=True)):
        size, behind = float(max(1, own)), sum(operations[index + 1 :])
        learned = learned and config.method != "rtn"
        plans.append(
            UnitPlan(
                size=size,
                refresh_size=size + 2 * behind,
                refreshes=refresh_count(config, last=index == len(operations) - 1) if learned else 0,
                iterations=config.iters if learned else 0,
            )
        )
    return plans


def images_for(chain: UnitChain, index: int, config: Config, count: int, looked_at: int) -> int:
    """Of `count` images, how many the units from `index` on need: all to learn from, few to search ranges."""
    if config.method != "rtn" and any(unit.reconstructed for unit in chain.units[index:]):
        return count
    return min(count, max(config.search_size, looked_at))


def first_steps(count: int) -> Part:
    """The first step of so many sizes of units; on a GPU they are compiled then, which takes its own time."""
    return Part(FIRST_STEP, 1.0, count)


def refresh_count(config: Config, last: bool) -> int:
    """How often perturbations are collected for a unit; the last one minimises the KL divergence itself."""
    return 0 if last or config.method not in FISHER_METHODS else config.resolved_rank
