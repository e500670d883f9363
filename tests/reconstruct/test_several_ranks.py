"""Several processes that quantize one model end with the integers that one process ends with.

They add up the same numbers in another order, so that the last bits of a gradient differ. In most runs as short as
these not one integer does; where a value lies between two codes to its last bits, a few in a thousand do. Hundreds
of iterations magnify it, as docs/several-processes.md says.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quantize_together import __file__ as SCRIPT
from quantize_together import integers
from safetensors.torch import load_file
from torchrun import torchrun

FEW = {"iters": 6, "rank": 2}
MOST_DIFFERENT = 0.004
"""Of all integers. Other images, masks or learning rates change some percent of them."""


def quantized_by(size: int, settings: dict[str, dict[str, Any]], folder: Path) -> None:
    """Leaves `NAME.safetensors` and `NAME.json` in the folder for each of the settings."""
    (folder / "settings.json").write_text(json.dumps(settings))
    job = torchrun(size, SCRIPT, folder)
    assert job.returncode == 0, job.stderr


def assert_same(name: str, given: dict[str, Any], folder: Path) -> None:
    codes, metrics = integers(given)
    of_ranks = load_file(folder / f"{name}.safetensors")
    assert codes.keys() == of_ranks.keys()
    different = sum(int((codes[layer] != of_ranks[layer]).sum()) for layer in codes)
    share = different / sum(layer.numel() for layer in codes.values())
    assert share <= MOST_DIFFERENT, f"{name}: {share:.3%} of the integers differ"
    told = json.loads((folder / f"{name}.json").read_text())
    assert told["fidelity"]["kl_divergence"] == pytest.approx(metrics["fidelity"]["kl_divergence"], rel=0.1)
    for one, other in zip(metrics["units"], told["units"], strict=True):
        assert one["losses"][0][1:] == pytest.approx(other["losses"][0][1:], rel=1e-3), one["unit"]


def test_two_processes_end_with_the_integers_of_one(tmp_path: Path) -> None:
    settings: dict[str, dict[str, Any]] = {
        "fima-q": {**FEW, "method": "fima-q", "calib_size": 32, "depth": 3},
        "brecq": {**FEW, "method": "brecq", "preset": "released", "calib_size": 32, "depth": 1},
    }
    quantized_by(2, settings, tmp_path)
    for name, given in settings.items():
        assert_same(name, given, tmp_path)


def test_three_processes_with_different_shares_do_too(tmp_path: Path) -> None:
    """50 images, batches of 16, 20 images for the search; then 67 of them, in a sweep of 64 and one of 3."""
    settings: dict[str, dict[str, Any]] = {
        "qdrop": {"iters": 6, "method": "qdrop", "depth": 2},
        "rtn": {"method": "rtn", "preset": "released", "depth": 2, "calib_size": 67, "search_size": 67},
    }
    quantized_by(3, settings, tmp_path)
    assert_same("qdrop", settings["qdrop"], tmp_path)
    # Nothing is added up in a range search: whole layers are searched, each by one process.
    codes = integers(settings["rtn"])[0]
    of_ranks = load_file(tmp_path / "rtn.safetensors")
    assert all(torch.equal(codes[name], of_ranks[name]) for name in codes)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_every_method_and_preset_ends_with_the_same_integers(size: int, tmp_path: Path) -> None:
    methods = ("rtn", "qdrop", "brecq", "diag", "rank1", "lowrank", "fima-q")
    settings: dict[str, dict[str, Any]] = {
        f"{method}-{preset}": {"method": method, "preset": preset, "iters": 20, "fisher_size": 31}
        for method in methods
        for preset in ("deploy", "released")
    }
    quantized_by(size, settings, tmp_path)
    for name, given in settings.items():
        assert_same(name, given, tmp_path)
