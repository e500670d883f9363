"""Accuracy of exported files beside the run's own model, image by image, and how often they agree.

Beside them: how often the run's own model agrees with itself when last bits are disturbed, which is what can be
expected of any other library.

    python benchmarks/exported.py runs/vit-tiny --val DIR --val-size 1000 --results exported.jsonl

RUN holds what `fimaq export` wrote: model.onnx, model.xml or both. DIR has one folder of images per class.
"""

import argparse
import json
from pathlib import Path

import torch

import fimaq
from fimaq.artifact.run_directory import RunDirectory
from fimaq.data import Preprocessing, build_transform, validation_batches, validation_set
from fimaq.export.formats import FORMATS
from fimaq.export.verify import last_bits_disturbed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="+")
    parser.add_argument("--val", type=Path, required=True)
    parser.add_argument("--val-size", type=int)
    parser.add_argument("--results", type=Path, help="file that every row is appended to, as JSON")
    options = parser.parse_args()
    for run in options.run:
        row = measure(run, options.val, options.val_size)
        print(json.dumps(row), flush=True)
        if options.results:
            with options.results.open("a") as file:
                file.write(json.dumps(row) + "\n")


@torch.no_grad()
def measure(run: Path, val: Path, size: int | None) -> dict[str, object]:
    config = RunDirectory.open_existing(run).config
    transform = build_transform(Preprocessing.from_dict(config["preprocessing"]))
    own = fimaq.load(run)
    dataset, _ = validation_set(val, config["model"]["num_classes"], transform, limit=size)
    kinds = [kind for kind in FORMATS.values() if (run / kind.file).is_file()]
    models = {"run": own, **{kind.runtime: kind.session(run / kind.file) for kind in kinds}}
    disturbed = "run, last bits disturbed"
    found: dict[str, list[torch.Tensor]] = {name: [] for name in (*models, disturbed)}
    labels = []
    for images, classes, _ in validation_batches(dataset, 50):
        labels.append(classes)
        for name, model in models.items():
            found[name].append(model(images).argmax(1))
        with last_bits_disturbed(own):
            found[disturbed].append(own(images).argmax(1))
    truth, chosen = torch.cat(labels), {name: torch.cat(parts) for name, parts in found.items()}
    return {
        "model": config["model"]["name"],
        **{key: config["settings"][key] for key in ("bits", "method", "iters", "calib_size", "precision")},
        "images": len(truth),
        "top1": {name: round(100 * (top == truth).double().mean().item(), 2) for name, top in chosen.items()},
        "agreement": {
            name: round(100 * (top == chosen["run"]).double().mean().item(), 2)
            for name, top in chosen.items()
            if name != "run"
        },
    }


if __name__ == "__main__":
    main()
