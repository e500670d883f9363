"""Speed of reconstruction on one GPU: step, Fisher refresh, range search, whole run, memory, time by kernel.

    python benchmarks/speed.py --at-once 6                    # the table of docs/speed.md
    python benchmarks/speed.py --profile --case "model=deit_tiny_patch16_224 precision=bf16"
    python benchmarks/speed.py --case "model=vit_base_patch16_224 memory_budget=4GiB" --results speed.jsonl
    python benchmarks/speed.py --unit-runs --case "model=deit_tiny_patch16_224 rank=1"      # all steps of one unit
    python benchmarks/speed.py --whole --case "model=swin_small_patch4_window7_224"         # all units: minutes

Measured is one unit (`unit=3`, the third block); a whole run is computed from it: blocks times (search + steps +
refreshes), where a refresh costs in proportion to the blocks behind the unit. Compilation is shown by itself, for
it is paid once. With `--whole` all units are reconstructed and timed, compilation included. Weights and images are
random: time does not depend on them. Each case is a process of its own. `--at-once` of them are rehearsed, and so
compiled, at the same time; each is then timed while the others wait. Nothing else should use the GPU.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier, Lock
from pathlib import Path
from typing import Any

import timm
import torch
from accuracy import value_of
from torch import Tensor, nn

from fimaq.calibrate.fold import fold_layer_norms
from fimaq.config import Config
from fimaq.device import numerics
from fimaq.errors import FimaqError
from fimaq.models.prepare import prepare_model
from fimaq.models.units import UnitChain
from fimaq.reconstruct.algorithm import Reconstruction
from fimaq.reconstruct.cache import ActivationCache
from fimaq.reconstruct.compiled import WARM_UP
from fimaq.reconstruct.memory import bounded
from fimaq.reconstruct.step import ReconstructionStep

CASES = [
    f"model={model} precision={precision}"
    for model in ("deit_tiny_patch16_224", "deit_small_patch16_224", "vit_base_patch16_224")
    for precision in ("tf32", "bf16")
]
DEFAULTS: dict[str, Any] = {"rank": 15, "iters": 20000, "bits": "w4a4", "images": 1024, "unit": 3, "img_size": 224}
STEPS = 300
FIRST_STEPS = "compile and record, s"
KINDS = {
    "matrix products": ("gemm", "cutlass", "nvjet", "cublas", "bmm", "_mm_", "splitk"),
    "fused element-wise kernels and reductions": ("triton",),
    "copies": ("memcpy", "memset"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", help='settings, such as "model=deit_tiny_patch16_224 rank=1"')
    parser.add_argument("--at-once", type=int, default=1, help="cases to prepare at the same time")
    parser.add_argument("--profile", action="store_true", help="print the time of a step by kernel")
    parser.add_argument("--unit-runs", action="store_true", help="also time all steps and refreshes of the unit")
    parser.add_argument("--whole", action="store_true", help="time all units of the model, not one")
    parser.add_argument("--results", type=Path, help="file that every row is appended to, as JSON")
    options = parser.parse_args()
    cases = options.case or CASES
    rows = [
        row
        for first in range(0, len(cases), options.at_once)
        for row in in_processes(options, cases[first : first + options.at_once])
    ]
    columns = [key for key in rows[0] if key != "device"] if rows else []
    print("| " + " | ".join(columns) + " |\n" + "| --- " * len(columns) + "|")
    for row in rows:
        print("| " + " | ".join(str(row[key]) for key in columns) + " |")


def in_processes(options: argparse.Namespace, cases: list[str]) -> Iterator[dict[str, Any]]:
    context = get_context("spawn")
    turns = Turns(context.Barrier(len(cases)), context.Lock())
    with ProcessPoolExecutor(len(cases), context, _take_turns, (turns,)) as processes:
        for row in processes.map(run_case, [options] * len(cases), cases):
            if row is not None:
                yield row


class Turns:
    """Lets one process after the other have the GPU, once all are prepared."""

    def __init__(self, prepared: Barrier, gpu: Lock) -> None:
        self.prepared, self.gpu, self.taken = prepared, gpu, False

    def wait_for_others(self) -> None:
        if not self.taken:
            self.taken = True
            self.prepared.wait()

    @contextmanager
    def alone(self) -> Iterator[None]:
        torch.cuda.synchronize()
        self.wait_for_others()
        with self.gpu:
            yield
            torch.cuda.synchronize()


def _take_turns(turns: Turns) -> None:
    global _turns
    _turns = turns


def run_case(options: argparse.Namespace, case: str) -> dict[str, Any] | None:
    """The row of one case; None if its memory budget is too small, which should not end the table."""
    given = dict(part.split("=", 1) for part in case.split())
    settings = {key: given.pop(key, value) for key, value in DEFAULTS.items()}
    try:
        measured = measure(options, **settings, **given)
    except FimaqError as error:
        print(case, error, flush=True)
        return None
    finally:
        _turns.wait_for_others()
    row = {"case": case, "device": torch.cuda.get_device_name(), **measured}
    with _turns.gpu:
        print(json.dumps(row), flush=True)
        if options.results:
            with options.results.open("a") as file:
                file.write(json.dumps(row) + "\n")
    return row


def measure(
    options: argparse.Namespace, model: str, images: str, unit: str, img_size: str, **settings: Any
) -> dict[str, Any]:
    """Seconds, milliseconds per step, and GiB, of one unit of `model` or of all."""
    arguments = {key: value_of(settings.pop(key)) for key in set(settings) - set(Config.model_fields)}
    config = Config.create(calib_size=int(images), device="cuda", **settings)
    index = int(unit)

    def walk(up_to: int = index) -> Reconstruction:
        """The same each time, with nothing else in memory."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.manual_seed(0)
        built = timm.create_model(model, img_size=int(img_size), **arguments).eval()
        return walk_to(built, torch.randn(int(images), 3, int(img_size), int(img_size)), up_to, config)

    with numerics(config, torch.device("cuda")), bounded(torch.device("cuda"), config.memory_budget):
        if options.whole:
            with _turns.alone():
                return _measure_whole(walk(0))
        rehearsed = _measure_unit(walk(), index)
        prepared = walk()
        with _turns.alone():
            row = _measure_unit(prepared, index, options.profile) | {FIRST_STEPS: rehearsed[FIRST_STEPS]}
            if options.unit_runs:
                prepared = walk()
                seconds = timed(lambda: prepared.reconstruct(index, lambda iteration, loss: None))
                row["the whole unit, s"] = round(seconds, 2)
    return row


def walk_to(built: nn.Module, images: Tensor, index: int, config: Config) -> Reconstruction:
    """Up to unit `index`, with full precision before it."""
    device = torch.device(config.device)
    built.to(device)
    example = images[:2].to(device)
    rescaled = config.preset == "deploy"
    structure = prepare_model(
        built, example, config.weight_bits, config.activation_bits, False, rescale_rows=rescaled
    )
    chain = UnitChain(built, structure, example)
    fold_layer_norms(built, example, lambda: (b.to(device) for b in images[:128].split(64)))
    walk = Reconstruction(chain, images, config, ActivationCache(len(images), device, budget=config.memory_budget))
    for earlier in range(index):
        walk.cache_full_precision(earlier)
        walk.advance(earlier)
    return walk


def _measure_whole(walk: Reconstruction) -> dict[str, Any]:
    def run(index: int) -> None:
        walk.reconstruct(index, lambda iteration, loss: None)
        walk.advance(index)

    seconds, searches, search = {}, [], walk.search_ranges
    walk.search_ranges = lambda unit: searches.append(timed(lambda: search(unit)))  # type: ignore[method-assign]
    for index, unit in enumerate(walk.chain.units):
        seconds[unit.name] = round(timed(lambda index=index: run(index)), 2)
        print(f"{unit.name} {seconds[unit.name]} s", flush=True)
    walk.cache.close()
    return {
        "whole run, min": round(sum(seconds.values()) / 60, 2),
        "range searches, s": round(sum(searches), 2),
        "peak GiB": round(torch.cuda.max_memory_reserved() / 2**30, 2),
        "seconds by unit": seconds,
    }


def _measure_unit(walk: Reconstruction, index: int, profile: bool = False) -> dict[str, Any]:
    unit, config, blocks = walk.chain.units[index], walk.config, len(walk.chain) - 2
    walk.cache_full_precision(index)
    first_search = timed(lambda: walk.search_ranges(unit))
    walk.cache_full_precision(index)
    search = timed(lambda: walk.search_ranges(unit))
    objective = walk.objective(index)
    step = ReconstructionStep(unit, objective, config, walk.cache)
    evaluate = walk.evaluation(index)
    first_refresh = timed(lambda: walk.refresh(index, objective, evaluate))
    later = walk.objective(index)  # of its own, for rank 1 has room for one refresh only
    refresh = timed(lambda: walk.refresh(index, later, evaluate))
    compiling = timed(lambda: [step() for _ in range(WARM_UP + 1)])
    timed(lambda: [step() for _ in range(50)])
    per_step = timed(lambda: [step() for _ in range(STEPS)]) / STEPS
    # A suffix of half the blocks on average; the first refresh of a unit also records the graph.
    mean_refresh = (first_refresh + (config.resolved_rank - 1) * refresh) / (blocks - index) * blocks / 2
    per_unit = search + mean_refresh + per_step * config.iters
    places = sorted({walk.cache.places[name] for name in ("raw inputs", "quantized inputs", "outputs")})
    if profile:
        _profile(step)
    step.finish()
    walk.cache.close()
    return {
        "ms per step": round(1000 * per_step, 3),
        "refresh, s": round(refresh, 3),
        "first refresh of a unit, s": round(first_refresh, 3),
        "range search of a unit, s": round(search, 3),
        "range search of the model, s": round(first_search + blocks * search, 2),
        FIRST_STEPS: round(compiling, 1),
        "whole run computed, min": round(blocks * per_unit / 60, 2),
        "peak GiB": round(torch.cuda.max_memory_reserved() / 2**30, 2),
        "images at a time": walk.sweep,
        "cache": " and ".join(places),
    }


def timed(function: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _profile(step: ReconstructionStep, times: int = 20) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(times):
            step()
        torch.cuda.synchronize()
    events = sorted(profiled.key_averages(), key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in events)
    print(f"kernels per step {sum(e.count for e in events) / times:.0f}, busy {total / times / 1000:.3f} ms")
    for kind, share in _shares(events, total):
        print(f"{100 * share:5.1f} %  {kind}")
    for event in events[:30]:
        print(f"{event.self_device_time_total / times:8.1f} us  {event.count / times:5.1f} x  {event.key[:110]}")


def _shares(events: Any, total: float) -> Iterator[tuple[str, float]]:
    """The share of time by kind of kernel."""
    kinds: dict[str, float] = {}
    for event in events:
        name = event.key.lower()
        kind = next((k for k, marks in KINDS.items() if any(mark in name for mark in marks)), "other kernels")
        kinds[kind] = kinds.get(kind, 0.0) + event.self_device_time_total
    yield from sorted(((kind, time / total) for kind, time in kinds.items()), key=lambda pair: -pair[1])


if __name__ == "__main__":
    main()
