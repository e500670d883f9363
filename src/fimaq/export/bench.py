"""Speed, size and memory of an exported file beside full precision, interleaved in one process."""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import onnx_ir as ir
import onnxruntime
import torch

from fimaq.artifact.files import read_json
from fimaq.artifact.run_directory import RunDirectory
from fimaq.errors import FimaqError, InputError
from fimaq.export.onnx_file import INPUT, translate
from fimaq.export.verify import open_session
from fimaq.models.build import build_architecture
from fimaq.progress import Silent

LATENCY, THROUGHPUT = 1, 16
"""Batch sizes: one image as fast as possible, and many."""
MEMORY_PROBE = """
import json, sys
import numpy, onnxruntime
def largest_resident_size():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
path, threads, batch, shape = json.loads(sys.argv[1])
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = threads
before = largest_resident_size()
session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
session.run(None, {"images": numpy.zeros([batch, *shape], dtype=numpy.float32)})
print(largest_resident_size() - before)
"""


def bench_run(run: Path, threads: int, repeats: int, progress: Silent | None = None) -> dict[str, Any]:
    """Times of RUN/model.onnx and of the same architecture in full precision, in onnxruntime on the CPU.

    The full-precision weights are random: time does not depend on them, and they need not be there.
    """
    progress = progress or Silent()
    quantized = run / "model.onnx"
    described = RunDirectory.open_existing(run).config["model"]
    if not quantized.is_file():
        raise InputError(f"{run} holds no model.onnx; make it with: fimaq export {run} --format onnx")
    if described["name"] is None:
        raise InputError(
            f"{run} was made from a model object; without a timm name there is nothing to compare with"
        )
    shape = read_json(run / "export.json")["input"]["shape"][1:]
    with tempfile.TemporaryDirectory() as folder:
        progress.note("translating the full-precision model")
        full = Path(folder) / "full_precision.onnx"
        model = build_architecture(described["name"], described["num_classes"], described["args"]).eval()
        full.write_bytes(ir.to_proto(translate(model, torch.randn(2, *shape))).SerializeToString())
        files = {"full_precision": full, "quantized": quantized}
        rows = [_interleaved(files, batch, shape, threads, repeats, progress) for batch in (LATENCY, THROUGHPUT)]
        sizes = {name: path.stat().st_size for name, path in files.items()}
        has_proc = Path("/proc/self/status").exists()  # Linux only
        memory = {name: _peak_memory(path, threads, shape) for name, path in files.items()} if has_proc else {}
    return {
        "runtime": f"onnxruntime {onnxruntime.__version__}",
        "threads": threads,
        "times": rows,
        "bytes": sizes,
        "peak_memory_bytes": memory,
    }


def _interleaved(
    files: dict[str, Path], batch: int, shape: list[int], threads: int, repeats: int, progress: Silent
) -> dict[str, Any]:
    """Both sessions take turns, so that whatever else the machine does slows both."""
    sessions = {name: open_session(path, threads) for name, path in files.items()}
    images = {INPUT: torch.randn(batch, *shape).numpy()}
    seconds: dict[str, list[float]] = {name: [] for name in sessions}
    progress.start(f"onnxruntime, batch {batch}", repeats)
    for turn in range(-2, repeats):  # two turns to warm up
        for name, session in sessions.items():
            began = time.perf_counter()
            session.run(None, images)
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


def _peak_memory(path: Path, threads: int, shape: list[int]) -> int:
    """Growth of a fresh process's largest resident size by loading the file and running it once."""
    arguments = json.dumps([str(path), threads, THROUGHPUT, shape])
    done = subprocess.run([sys.executable, "-c", MEMORY_PROBE, arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise FimaqError(f"{path} could not be run in a process of its own: {done.stderr.strip()[-300:]}")
    return int(done.stdout)
