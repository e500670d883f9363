"""Speed, size and memory of exported files beside full precision, interleaved in one process."""

import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fimaq.artifact.files import write_json
from fimaq.artifact.run_directory import RunDirectory
from fimaq.errors import FimaqError, InputError
from fimaq.export.deliver import exported_record, refuse_detectors
from fimaq.export.formats import FORMATS, Format
from fimaq.models.build import build_architecture
from fimaq.progress import Silent

LATENCY, THROUGHPUT = 1, 16
"""Batch sizes: one image as fast as possible, and many."""
BENCH = "bench.json"
MEMORY_PROBE = """
import json, sys
from pathlib import Path
import torch
from fimaq.export.formats import FORMATS
def largest_resident_size():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
name, path, threads, batch, shape = json.loads(sys.argv[1])
FORMATS[name].require()
before = largest_resident_size()
FORMATS[name].session(Path(path), threads, [batch, *shape])(torch.zeros(batch, *shape))
print(largest_resident_size() - before)
"""


def bench_run(run: Path, threads: int, repeats: int, progress: Silent | None = None) -> dict[str, Any]:
    """Times of the exported files in RUN and of the same architecture in full precision, each in its runtime.

    Also written to RUN/bench.json, in place of an earlier one, where RUN can be written.

    The full-precision weights are random: time does not depend on them, and they need not be there.
    """
    progress = progress or Silent()
    directory = RunDirectory.open_existing(run)
    refuse_detectors(directory)
    described = directory.config["model"]
    formats = [kind for kind in FORMATS.values() if (run / kind.file).is_file()]
    if not formats:
        names = " and ".join(kind.file for kind in FORMATS.values())
        raise InputError(f"{run} holds neither {names}; make one with: fimaq export {run} --format onnx")
    if described["name"] is None:
        raise InputError(
            f"{run} was made from a model object; without a timm name there is nothing to compare with"
        )
    model = build_architecture(described["name"], described["num_classes"], described["args"]).eval()
    result = {
        "threads": threads,
        "repeats": repeats,
        "machine": platform.machine(),
        "runtimes": {kind.runtime: _in_runtime(kind, run, model, threads, repeats, progress) for kind in formats},
    }
    try:
        write_json(run / BENCH, result)
    except FimaqError as error:
        progress.note(f"the result is not stored: {error}")
    return result


def _in_runtime(
    kind: Format, run: Path, model: nn.Module, threads: int, repeats: int, progress: Silent
) -> dict[str, Any]:
    kind.require()
    given = exported_record(run, kind)["input"]
    shape = [given["shape"][1], *given["size"]]
    with tempfile.TemporaryDirectory() as folder:
        progress.note(f"translating the full-precision model for {kind.runtime}")
        full = Path(folder) / kind.file
        kind.write(model, torch.randn(2, *shape), full, lowered=False)
        files = {"full_precision": full, "quantized": run / kind.file}
        rows = [_interleaved(kind, files, n, shape, threads, repeats, progress) for n in (LATENCY, THROUGHPUT)]
        has_proc = Path("/proc/self/status").exists()  # Linux only
        return {
            "version": kind.version,
            "times": rows,
            "bytes": {name: kind.size(path) for name, path in files.items()},
            "peak_memory_bytes": {
                name: _peak_memory(kind, path, threads, shape) for name, path in files.items() if has_proc
            },
        }


def _interleaved(
    kind: Format,
    files: dict[str, Path],
    batch: int,
    shape: list[int],
    threads: int,
    repeats: int,
    progress: Silent,
) -> dict[str, Any]:
    """Both sessions take turns, so that whatever else the machine does slows both."""
    images = torch.randn(batch, *shape)
    sessions = {name: kind.session(path, threads, images.shape) for name, path in files.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sessions}
    progress.start(f"{kind.runtime}, batch {batch}", repeats)
    for turn in range(-2, repeats):  # two turns to warm up
        for name, session in sessions.items():
            began = time.perf_counter()
            session(images)
            if turn >= 0:
                seconds[name].append(time.perf_counter() - began)
        progress.update(max(0, turn + 1))
    row: dict[str, Any] = {"batch": batch}
    for name, found in seconds.items():
        low, middle, high = statistics.quantiles(found, n=4)
        row[name] = {
            "median_ms": round(1000 * middle, 3),
            "quartiles_ms": [round(1000 * low, 3), round(1000 * high, 3)],
            "images_per_second": round(batch / middle, 2),
        }
    row["speedup"] = round(row["full_precision"]["median_ms"] / row["quantized"]["median_ms"], 3)
    return row


def _peak_memory(kind: Format, path: Path, threads: int, shape: list[int]) -> int:
    """Growth of a fresh process's largest resident size by loading the file and running it once."""
    arguments = json.dumps([kind.name, str(path), threads, THROUGHPUT, shape])
    done = subprocess.run([sys.executable, "-c", MEMORY_PROBE, arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise FimaqError(f"{path} could not be run in a process of its own: {done.stderr.strip()[-300:]}")
    return int(done.stdout)
