"""Started by torchrun: quantizes a model once for each setting, and stores its integers and metrics."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

import fimaq
from fimaq.data.demo import demo_calibration, demo_model
from fimaq.quant.layers import quantized_layers
from fimaq.ranks import ALONE, Ranks
from fimaq.together import Together, joined_ranks
from fimaq.watch import Watch

USUAL: dict[str, Any] = {"bits": "w3a3", "batch_size": 16, "search_size": 20, "device": "cpu"}


def integers(settings: dict[str, Any], ranks: Ranks = ALONE) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The integer weights of each layer, and the run's metrics."""
    images = demo_calibration(settings.get("calib_size", 50))
    model = demo_model()
    if "depth" in settings:  # the first blocks alone, for a quicker run
        model.blocks = model.blocks[: settings["depth"]]
    given = {name: value for name, value in settings.items() if name != "depth"}
    run = fimaq.quantize(model, images, ranks=ranks, **{**USUAL, **given})
    return {name: layer.codes.cpu() for name, layer in quantized_layers(run.model)}, run.metrics


@contextlib.contextmanager
def all_ranks() -> Iterator[Ranks]:
    """Those of the job; also a single one, which then sends to itself what it would send to others."""
    if os.environ["WORLD_SIZE"] != "1":
        with joined_ranks() as ranks:
            yield ranks
        return
    lone = Together(Watch(0, 1))
    yield lone
    lone.part()


if __name__ == "__main__":
    with all_ranks() as joined:
        folder = Path(sys.argv[1])
        for name, given in json.loads((folder / "settings.json").read_text()).items():
            codes, metrics = integers(given, joined)
            if joined.rank == 0:
                save_file(codes, folder / f"{name}.safetensors")
                (folder / f"{name}.json").write_text(json.dumps(metrics))
