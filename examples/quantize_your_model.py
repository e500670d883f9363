"""From a trained model in Python to an integer file: quantize, measure, store, load, export.

    python examples/quantize_your_model.py runs/example

It runs as it is, in seconds, on the digits that come with the package. For your own model replace the three lines
marked below; the rest stays. The last step needs the extra `export`: pip install 'fimaq[export]'.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import fimaq
from fimaq.data.demo import demo_calibration, demo_model, demo_test
from fimaq.export.deliver import export_run
from fimaq.progress import for_terminal


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Top-1 in percent."""
    return float((model(images).argmax(1) == labels).float().mean() * 100)


def main(out: Path) -> dict[str, float]:
    model = demo_model()  # yours: timm.create_model("deit_tiny_patch16_224", pretrained=True)
    calibration = demo_calibration(64)  # yours: preprocessed, unlabelled images (n, C, H, W), or a DataLoader
    images, labels = demo_test()  # yours: images with labels, to measure with

    with for_terminal() as progress:
        run = fimaq.quantize(
            model, calibration, bits="w4a4", iters=20, search_size=32, device="cpu", out=out, progress=progress
        )
        loaded = fimaq.load(out, model=model)  # later, elsewhere; no `model=` where timm knows its name
        record = export_run(out, {"test": images[:200]}, model=model, progress=progress)

    compared = record["verification"]["agreement"]["test"]
    found = {
        "full precision": accuracy(model, images, labels),
        "quantized": accuracy(run.model, images, labels),
        "loaded": accuracy(loaded, images, labels),
        "same class in onnxruntime": 100 * compared["same_top1"] / compared["images"],
    }
    for name, percent in found.items():
        print(f"{name}: {percent:.2f} %")
    size = run.metrics["size"]
    print(f"{size['quantized_bytes'] / 1e3:.0f} kB instead of {size['full_precision_bytes'] / 1e3:.0f}")
    print(f"{out / record['file']}: {record['quantized_products']} products in integer")
    return found


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} OUT, a new folder for the run")
    main(Path(sys.argv[1]))
