"""Box and mask AP of a queue of settings on one detector of train_detector.py, results written as they come.

    python benchmarks/detection.py mask.safetensors --data SHAPES --results results.jsonl \
        --run "bits=w3a3 method=rtn" --run "bits=w3a3 method=fima-q seed=1 iters=300 rank=5"

The first row is full precision, unless --no-full-precision. A run is not started if even the shortest so far would
not end within --seconds.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from accuracy import settings_of, write_row

from fimaq.artifact.files import read_tensors
from fimaq.config import Config
from fimaq.data import load_calibration
from fimaq.data.coco import CocoSet, find_coco
from fimaq.data.detection_image import DetectionPreprocessing
from fimaq.detection.accuracy import evaluate_detectors
from fimaq.detection.build import build_detector
from fimaq.detection.detector import Detector
from fimaq.detection.quantize import quantize_detector
from fimaq.device import choose_device
from fimaq.progress import Lines, Silent

SIZE = 256
"""Pixels of an image's sides, as make_shapes.py makes them."""


def main() -> None:
    options = _parse()
    device = choose_device(options.device)
    tensors, metadata = read_tensors(options.weights)
    preprocessing = DetectionPreprocessing(SIZE, SIZE)
    coco = CocoSet.open(*find_coco(options.data, "val"))
    calibration = load_calibration(options.data / "train", options.calib_size, preprocessing.on_canvas, seed=0)
    sizes = [preprocessing.canvas] * len(calibration.images)

    def trained() -> Detector:
        arguments = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(metadata["args"]).items()}
        detector = build_detector(metadata["model"], len(json.loads(metadata["classes"])), arguments)
        detector.load_state_dict(tensors)
        return detector.to(device).eval()

    def measured(detector: Detector) -> dict[str, float]:
        scores = evaluate_detectors({"one": detector}, coco, preprocessing, device, Silent(), options.val_size)
        return {
            f"{kind}_ap": round(scores["one"][key]["AP"], 2) for kind, key in (("box", "bbox"), ("mask", "segm"))
        }

    model: dict[str, Any] = {"model": metadata["model"]}
    if options.full_precision:
        write_row(options.results, {**model, "run": "full precision", **measured(trained())})
    began, shortest = time.monotonic(), 0.0
    for run in options.run:
        start = time.monotonic()
        if start - began + shortest > options.seconds:
            print("not started for want of time:", run, flush=True)
            continue
        given = {
            "calib_size": options.calib_size,
            "batch_size": 16,
            "image_size": (SIZE, SIZE),
            **settings_of(run),
        }
        config = Config.create(task="detection", device=options.device, **given)
        detector, progress = trained(), Lines() if options.verbose else Silent()
        stored = (preprocessing, calibration.fingerprint, None, False, progress)
        result = quantize_detector(detector, calibration.images, sizes, config, *stored)
        row = {**model, "run": run, **measured(detector)}
        row["proposals_kl"] = round(result.metrics["fidelity"]["kl_divergence"], 4)
        seconds = time.monotonic() - start
        shortest = min(seconds, shortest or seconds)
        write_row(options.results, {**row, "seconds": round(seconds, 1)})


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path, help="file that train_detector.py wrote")
    parser.add_argument("--data", type=Path, required=True, help="folder made by make_shapes.py")
    parser.add_argument("--run", action="append", default=[], help='settings, such as "bits=w4a4 method=qdrop"')
    parser.add_argument("--calib-size", type=int, default=256)
    parser.add_argument("--val-size", type=int)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--full-precision", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--results", type=Path)
    parser.add_argument("--verbose", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
