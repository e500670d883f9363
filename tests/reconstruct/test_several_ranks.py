"""Several processes that quantize one model end with the integers that one process ends with.

One process that adds gradients up in as many parts has the same bits. One that does not adds up the same numbers
in another order: in most runs as short as these not one integer differs; where a value lies between two codes to
its last bits, a few in a thousand do. Hundreds of iterations magnify it, as docs/several-processes.md says.
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
"""Of all integers, without parts. Other images, masks or learning rates change some percent of them."""


def quantized_by(size: int, settings: dict[str, dict[str, Any]], folder: Path) -> None:
    """Leaves `NAME.safetensors` and `NAME.json` in the folder for each of the settings."""
    (folder / "settings.json").write_text(json.dumps(settings))
    job = torchrun(size, SCRIPT, folder)
    assert job.returncode == 0, job.stderr


def share_that_differs(name: str, codes: dict[str, torch.Tensor], folder: Path) -> float:
    of_ranks = load_file(folder / f"{name}.safetensors")
    assert codes.keys() == of_ranks.keys()
    different = sum(int((codes[layer] != of_ranks[layer]).sum()) for layer in codes)
    return different / sum(layer.numel() for layer in codes.values())


def assert_alike(name: str, given: dict[str, Any], folder: Path) -> None:
    codes, metrics = integers(given)
    share = share_that_differs(name, codes, folder)
    assert share <= MOST_DIFFERENT, f"{name}: {share:.3%} of the integers differ"
    told = json.loads((folder / f"{name}.json").read_text())
    assert told["fidelity"]["kl_divergence"] == pytest.approx(metrics["fidelity"]["kl_divergence"], rel=0.1)
    for one, other in zip(metrics["units"], told["units"], strict=True):
        first = [[loss for _, loss in unit["losses"][:1]] for unit in (one, other)]
        assert first[0] == pytest.approx(first[1], rel=1e-2), one["unit"]


def assert_same_bits(name: str, given: dict[str, Any], size: int, folder: Path) -> None:
    """Every integer and every loss on the way to it, of one process that works in as many parts."""
    codes, metrics = integers({**given, "parts": size})
    assert share_that_differs(name, codes, folder) == 0, name
    told = json.loads((folder / f"{name}.json").read_text())
    assert [unit["losses"] for unit in told["units"]] == json.loads(
        json.dumps([unit["losses"] for unit in metrics["units"]])
    )


def test_two_processes_end_with_the_integers_of_one(tmp_path: Path) -> None:
    settings: dict[str, dict[str, Any]] = {
        "fima-q": {**FEW, "method": "fima-q", "calib_size": 32, "depth": 3},
        "brecq": {**FEW, "method": "brecq", "preset": "released", "calib_size": 32, "depth": 1},
        "longer": {"iters": 100, "rank": 3, "method": "fima-q", "depth": 1},
    }
    quantized_by(2, settings, tmp_path)
    for name in ("fima-q", "brecq"):
        assert_alike(name, settings[name], tmp_path)
    assert_same_bits("longer", settings["longer"], 2, tmp_path)


def test_three_processes_with_different_shares_do_too(tmp_path: Path) -> None:
    """50 images, batches of 16, 20 images for the search; then 67 of them, in a sweep of 64 and one of 3."""
    settings: dict[str, dict[str, Any]] = {
        "qdrop": {"iters": 6, "method": "qdrop", "depth": 2},
        "rtn": {"method": "rtn", "preset": "released", "depth": 2, "calib_size": 67, "search_size": 67},
    }
    quantized_by(3, settings, tmp_path)
    assert_alike("qdrop", settings["qdrop"], tmp_path)
    assert_same_bits("qdrop", settings["qdrop"], 3, tmp_path)
    # Nothing is added up in a range search: whole layers are searched, each by one process.
    assert share_that_differs("rtn", integers(settings["rtn"])[0], tmp_path) == 0


def test_a_process_that_sends_to_itself_has_its_bits(tmp_path: Path) -> None:
    settings = {"fima-q": {"iters": 20, "rank": 2, "depth": 1}}
    quantized_by(1, settings, tmp_path)
    assert_same_bits("fima-q", settings["fima-q"], 1, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch sees no CUDA GPU")
@pytest.mark.parametrize("compiled", [False, True])
def test_it_does_on_a_gpu_with_messages_between_recorded_graphs(compiled: bool, tmp_path: Path) -> None:
    settings = {"fima-q": {"iters": 20, "rank": 2, "depth": 1, "device": "cuda", "compile": compiled}}
    quantized_by(1, settings, tmp_path)
    assert_alike("fima-q", settings["fima-q"], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "iters"), [(2, 40), (3, 20)])
def test_every_method_and_preset_ends_with_the_same_integers(size: int, iters: int, tmp_path: Path) -> None:
    methods = ("rtn", "qdrop", "brecq", "diag", "rank1", "lowrank", "fima-q")
    settings: dict[str, dict[str, Any]] = {
        f"{method}-{preset}": {"method": method, "preset": preset, "iters": iters, "fisher_size": 31, "depth": 4}
        for method in methods
        for preset in ("deploy", "released")
    }
    quantized_by(size, settings, tmp_path)
    for name, given in settings.items():
        assert_same_bits(name, given, size, tmp_path)
