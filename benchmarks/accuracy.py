"""Accuracy of a queue of settings on one model, full precision beside each, results written as they come.

    python benchmarks/accuracy.py vit_tiny_patch16_224 --weights W.safetensors --data DIR --crop-pct 1.0 \
        --run "bits=w3a3 method=qdrop iters=700" --run "bits=w3a3 method=fima-q iters=700 rank=5" \
        --results results.jsonl

Images are decoded once and stay on the device. A run is not started if even the shortest so far would not end
within --seconds. With --runs, each setting has its run directory there, and an interrupted queue can be continued.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fimaq
from fimaq.config import Config
from fimaq.data import build_transform, load_calibration, resolve_preprocessing, validation_batches, validation_set
from fimaq.device import choose_device
from fimaq.fisher.divergence import kl_divergence
from fimaq.models.build import build_model
from fimaq.progress import Lines


def main() -> None:
    options = _parse()
    device = choose_device(options.device)
    arguments = {k: value_of(v) for k, v in (a.split("=", 1) for a in options.model_arg)}
    model = build_model(options.model, options.weights, options.num_classes, arguments)
    transform = build_transform(resolve_preprocessing(model, crop_pct=options.crop_pct))
    calibration = load_calibration(options.data / "train", options.calib_size, transform, seed=0).images
    classes = getattr(model, "num_classes", 1000)
    dataset, _ = validation_set(options.val or options.data / "val", classes, transform, limit=options.val_size)
    model.to(device)
    with torch.no_grad():
        val = [(x.to(device), y.to(device), model(x.to(device))) for x, y, _ in validation_batches(dataset, 250)]
    write_row(options.results, {"model": options.model, "full_precision": measure(model, val)["top1"]})
    model.cpu()

    began, shortest = time.monotonic(), 0.0
    for run in options.run:
        if time.monotonic() - began + shortest > options.seconds:
            print("not started for want of time:", run, flush=True)
            continue
        settings = settings_of(run)
        start = time.monotonic()
        progress = Lines() if options.verbose else None
        images = calibration[: settings.pop("images", None)]
        kept = {"out": options.runs / run.replace(" ", "-"), "resume": True} if options.runs else {}
        made = {} if options.crop_pct is None else {"preprocessing": {"crop_pct": options.crop_pct}}
        result = fimaq.quantize(model, images, progress=progress, **made, **kept, **settings)
        seconds = time.monotonic() - start
        shortest = min(seconds, shortest or seconds)
        row = {
            "model": options.model,
            "run": run,
            **measure(result.model, val),
            "seconds": round(seconds, 1),
            "calibration_kl": round(result.metrics["fidelity"]["kl_divergence"], 5),
            "peak_gib": round(result.metrics["peak_memory_bytes"] / 2**30, 2),
            "unit_seconds": [u["seconds"] for u in result.metrics["units"]],
        }
        write_row(options.results, row)


@torch.no_grad()
def measure(model: nn.Module, batches: list[tuple[Tensor, Tensor, Tensor]]) -> dict[str, float]:
    """Top-1 in percent, and the mean KL divergence from full precision: of images, labels, its logits."""
    outputs = [model(x) for x, _, _ in batches]
    right = [(out.argmax(1) == y).float() for out, (_, y, _) in zip(outputs, batches, strict=True)]
    divergence = [kl_divergence(teacher, out) for out, (_, _, teacher) in zip(outputs, batches, strict=True)]
    return {
        "top1": round(100 * torch.cat(right).mean().item(), 2),
        "kl": round(torch.cat(divergence).mean().item(), 4),
    }


def write_row(path: Path | None, row: dict[str, Any]) -> None:
    print(json.dumps(row), flush=True)
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def settings_of(run: str) -> dict[str, Any]:
    """What a text such as "bits=w4a4 iters=700" asks for."""
    return {key: value_of(value) for key, value in (part.split("=", 1) for part in run.split())}


def value_of(text: str) -> Any:
    if "," in text:
        return tuple(value_of(part) for part in text.split(","))
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text, text)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--model-arg", action="append", default=[])
    parser.add_argument("--num-classes", type=int)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--val", type=Path, help="validation images, instead of DIR/val")
    parser.add_argument("--crop-pct", type=float)
    parser.add_argument("--calib-size", type=int, default=Config.model_fields["calib_size"].default)
    parser.add_argument("--val-size", type=int)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--run", action="append", default=[], help='settings, such as "bits=w4a4 method=qdrop"')
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--results", type=Path)
    parser.add_argument("--runs", type=Path, help="folder for run directories")
    parser.add_argument("--verbose", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
