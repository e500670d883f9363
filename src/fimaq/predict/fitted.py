"""Times and GPU memory on an NVIDIA H200, fitted to what was measured there (docs/speed.md, "Predicting a run").

A refresh moves activations more than it multiplies, so its time follows bytes; that of a step follows bytes and
operations.
"""

from fimaq.config import Config
from fimaq.predict.sizes import Sizes, UnitSize
from fimaq.reconstruct.plan import UnitPlan

MEBIBYTE, GIBIBYTE = 2**20, 2**30

STEP_BATCH = 32
STEP = {
    "bf16": (0.067e-3, 0.099e-3, 0.110e-12),
    "tf32": (0.067e-3, 0.185e-3, 0.258e-12),
    "fp32": (0.067e-3, 0.185e-3, 2.57e-12),
}
"""A step at that batch: fixed; for each MiB that the unit's layers read per image; for each operation of one
image. fp32 was measured on one model."""
UNFUSED_SECONDS = 2e-3
"""More in each step that is not compiled."""
COMPILE_SECONDS = 15.0
"""For each kind of unit, with an empty compile cache."""
REFRESH_PER_MEBIBYTE = 0.0098 / 1024
"""For each image, and each MiB that the suffix keeps of it."""
REFRESH_SLOWER = {"bf16": 0.5, "tf32": 1.0, "fp32": 1.6}
SUFFIX_KEPT = {"bf16": 0.45, "tf32": 1.0, "fp32": 1.0}
"""Of what a suffix keeps in single precision: beside steps in bf16 it runs in float16."""
SEARCH_PER_TOKEN_BYTE = 8.7 / MEBIBYTE
"""For each byte that the unit's layers read per token; how many tokens are looked at is bounded."""
SEARCH_BOUNDED, REFRESH_BOUNDED = 3.8, 1.9
"""How much longer both take with a memory budget: what a search looks at is kept on the host, and fewer images go
through a suffix at a time."""
SETUP_SECONDS = 5.0

RECORDED_COPIES, WORK_BYTES = 2, 0.6 * GIBIBYTE
"""GPU memory beside lists, model and what the suffix keeps: of what a range search looks at, and the rest."""
HOST_LIBRARIES = 1 * GIBIBYTE
"""What a process with CUDA takes on the host."""


def step_seconds(unit: UnitSize, config: Config) -> float:
    """One iteration of the unit."""
    fixed, per_mebibyte, per_operation = STEP[config.precision or "fp32"]
    moved = per_mebibyte * unit.recorded / MEBIBYTE + per_operation * unit.operations
    unfused = 0.0 if config.compiles("cuda") else UNFUSED_SECONDS
    return fixed + unfused + moved * config.batch_size / STEP_BATCH


def refresh_seconds(sizes: Sizes, index: int, config: Config) -> float:
    """One Fisher refresh at unit `index`."""
    images = min(config.fisher_size or config.calib_size, config.calib_size)
    per_image = REFRESH_PER_MEBIBYTE * sizes.saved_behind(index) / MEBIBYTE
    longer = 1.0 if config.memory_budget is None else REFRESH_BOUNDED
    return longer * images * per_image * REFRESH_SLOWER[config.precision or "fp32"]


def search_seconds(unit: UnitSize, config: Config) -> float:
    """The range search of the unit."""
    longer = 1.0 if config.memory_budget is None else SEARCH_BOUNDED
    return longer * SEARCH_PER_TOKEN_BYTE * unit.recorded / unit.tokens


def stage_seconds(sizes: Sizes, plans: list[UnitPlan], config: Config) -> dict[str, float]:
    """Seconds of a whole run by stage."""
    numbered = list(zip(sizes.units, plans, strict=True))
    kinds = {unit.kind for unit, plan in numbered if plan.iterations}
    return {
        "setup": SETUP_SECONDS,
        "range search": sum(search_seconds(unit, config) for unit, _ in numbered),
        "refreshes": sum(
            plan.refreshes * refresh_seconds(sizes, i, config) for i, (_, plan) in enumerate(numbered)
        ),
        "steps": sum(plan.iterations * step_seconds(unit, config) for unit, plan in numbered),
        "compilation": COMPILE_SECONDS * len(kinds) if config.compiles("cuda") else 0.0,
    }


def gpu_bytes(
    sizes: Sizes, lists: int, while_learning: list[int], sweep: int, refreshed: bool, config: Config
) -> float:
    """The most memory on the GPU. `lists`: the most that cached lists take there; `while_learning`: by unit."""
    search = RECORDED_COPIES * config.search_size * max(unit.recorded for unit in sizes.units)
    work = sizes.model_bytes + WORK_BYTES + search
    kept = SUFFIX_KEPT[config.precision or "fp32"]
    suffixes = [kept * sweep * sizes.saved_behind(i) for i in range(len(while_learning))]
    learning = [held + (suffix if refreshed else 0) for held, suffix in zip(while_learning, suffixes, strict=True)]
    needed = work + max(lists, *learning)
    return needed if config.memory_budget is None else min(needed, config.memory_budget)
