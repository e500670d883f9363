"""Speed of reconstruction on this CPU: step, refresh and range search of a block, also without what makes it fast.

    python benchmarks/speed_cpu.py --threads 2
    python benchmarks/speed_cpu.py --model deit_small_patch16_224 --results speed-cpu.jsonl

Each way takes its turn again and again, so that what else the machine does hits all of them. Shown are medians.
Weights and images are random: time does not depend on them.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from unittest.mock import patch

import timm
import torch
from speed import walk_to

from fimaq.calibrate import search
from fimaq.config import Config
from fimaq.device import onednn, onednn_is_exact
from fimaq.quant import blocks
from fimaq.reconstruct.algorithm import Reconstruction
from fimaq.reconstruct.step import ReconstructionStep

UNIT = 3
STEPS = 5


@contextmanager
def way(library: bool, in_blocks: bool) -> Iterator[None]:
    """Products by oneDNN or by PyTorch's usual library; fake quantization block by block or on whole tensors."""
    with ExitStack() as stack:
        stack.enter_context(onednn() if library else nullcontext())
        if not in_blocks:
            stack.enter_context(patch.object(blocks, "on_cpu", lambda x: False))
            stack.enter_context(patch.dict(search.CHUNK_ELEMENTS, cpu=2**25))
        yield


WAYS = {
    "as it is": (onednn_is_exact(), True),
    "usual library": (False, True),
    "whole tensors": (onednn_is_exact(), False),
    "both": (False, False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_tiny_patch16_224")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--bits", default="w4a4")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--results", type=Path, help="file that the row is appended to, as JSON")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = Config.create(calib_size=options.images, device="cpu", bits=options.bits, iters=10**6, rank=1)
    model = timm.create_model(options.model).eval()
    walk = walk_to(model, torch.randn(options.images, 3, 224, 224), UNIT, config)
    rows = measure(walk, options.turns)
    print("| | step, ms | refresh, s | range search of a unit, s |\n| --- | --- | --- | --- |")
    for name, (step, refresh, searched) in rows.items():
        print(f"| {name} | {1000 * step:.0f} | {refresh:.2f} | {searched:.2f} |")
    if options.results:
        settings = {key: value for key, value in vars(options).items() if key != "results"}
        about = {**settings, "torch": torch.__version__, "processor": processor()}
        with options.results.open("a") as file:
            file.write(json.dumps({**about, **rows}) + "\n")


def measure(walk: Reconstruction, turns: int) -> dict[str, list[float]]:
    """Seconds of a step, a refresh and a range search, each way."""
    seconds: dict[str, list[tuple[float, ...]]] = {name: [] for name in WAYS}
    for _ in range(turns):
        for name, settings in WAYS.items():
            with way(*settings):
                seconds[name].append(measure_once(walk))
    return {name: [median(column) for column in zip(*rows, strict=True)] for name, rows in seconds.items()}


def measure_once(walk: Reconstruction) -> tuple[float, ...]:
    unit = walk.chain.units[UNIT]
    walk.cache_full_precision(UNIT)
    searched = timed(lambda: walk.search_ranges(unit))
    objective, evaluate = walk.objective(UNIT), walk.evaluation(UNIT)
    refresh = timed(lambda: walk.refresh(UNIT, objective, evaluate))
    step = ReconstructionStep(unit, objective, walk.config, walk.cache)
    step()
    per_step = timed(lambda: [step() for _ in range(STEPS)]) / STEPS
    step.finish()
    for layer in step.layers.values():
        layer.weight_quantizer.rounding = None
    return per_step, refresh, searched


def timed(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "not named")


if __name__ == "__main__":
    main()
