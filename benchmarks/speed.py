"""Speed of reconstruction on one GPU, for one unit: step, Fisher refresh, range search, memory, time by kernel.

    python benchmarks/speed.py deit_tiny_patch16_224 --rank 15 --iters 20000 --profile

Weights and images are random: time does not depend on them. Every figure is of one process alone on the machine.
"""

import argparse
import json
import time
from typing import Any

import timm
import torch

from fimaq.calibrate.fold import fold_layer_norms
from fimaq.calibrate.ranges import set_ranges
from fimaq.config import Config
from fimaq.models.prepare import prepare_model
from fimaq.models.units import UnitChain
from fimaq.pipeline import _numerics
from fimaq.quant.layers import set_quantized
from fimaq.reconstruct.algorithm import Reconstruction
from fimaq.reconstruct.cache import ActivationCache
from fimaq.reconstruct.step import ReconstructionStep


def main() -> None:
    options = _parse()
    device = torch.device("cuda")
    config = Config.create(
        bits=options.bits, preset=options.preset, method=options.method, rank=options.rank, iters=options.iters,
        precision=options.precision, calib_size=options.images, batch_size=32,
    )  # fmt: skip
    with _numerics(config):
        measured = measure(options, config, device)
    row = {"model": options.model, **vars(options), "device": torch.cuda.get_device_name(), **measured}
    print(json.dumps(row), flush=True)


def measure(options: argparse.Namespace, config: Config, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(0)
    model = timm.create_model(options.model).to(device).eval()
    images = torch.randn(options.images, 3, 224, 224)
    example = images[:2].to(device)
    structure = prepare_model(model, example, config.weight_bits, config.activation_bits, False)
    chain = UnitChain(model, structure, example)
    fold_layer_norms(model, example, lambda: (b.to(device) for b in images[:128].split(64)))
    walk = Reconstruction(chain, images, config, ActivationCache(len(images), device))
    for index in range(options.unit):
        walk.cache_full_precision(index)
        walk.advance(index)
    unit = chain.units[options.unit]
    walk.cache_full_precision(options.unit)
    seconds: dict[str, Any] = {}

    def timed(name: str, function: Any) -> Any:
        torch.cuda.synchronize()
        began = time.perf_counter()
        result = function()
        torch.cuda.synchronize()
        seconds[name] = round(time.perf_counter() - began, 4)
        return result

    def repeat(count: int) -> None:
        for _ in range(count):
            step()

    def search() -> None:
        set_ranges(unit.module, lambda: walk._run_for_ranges(unit), config.preset)

    timed("first range search of the unit", search)
    timed("range search of the unit", search)
    set_quantized(unit.module, True)
    objective = walk._objective(options.unit)
    step = ReconstructionStep(unit, objective, config, walk.cache)
    evaluate = walk._evaluation(options.unit)
    timed("first refresh", lambda: walk._refresh(options.unit, objective, evaluate))
    timed("refresh", lambda: walk._refresh(options.unit, objective, evaluate))
    timed("compile and record", lambda: repeat(4))
    timed("warm", lambda: repeat(50))
    timed("steps", lambda: repeat(options.steps))
    seconds["ms per step"] = round(1000 * seconds.pop("steps") / options.steps, 4)
    seconds["peak GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    if options.profile:
        _profile(step)
    return seconds


def _profile(step: ReconstructionStep) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(20):
            step()
        torch.cuda.synchronize()
    rows = sorted(profiled.key_averages(), key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in rows)
    print(f"kernels per step {sum(e.count for e in rows) / 20:.0f}, busy {total / 20 / 1000:.3f} ms")
    for event in rows[:40]:
        print(f"{event.self_device_time_total / 20:8.1f} us  {event.count / 20:5.1f} x  {event.key[:110]}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--bits", default="w4a4")
    parser.add_argument("--preset", default="deploy")
    parser.add_argument("--method", default="fima-q")
    parser.add_argument("--precision", default="tf32")
    parser.add_argument("--rank", type=int, default=15)
    parser.add_argument("--iters", type=int, default=20000)
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--unit", type=int, default=3, help="which unit is measured; 1 is the first block")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--profile", action="store_true", help="print the time of a step by kernel")
    return parser.parse_args()


if __name__ == "__main__":
    main()
