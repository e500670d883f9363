"""`fimaq.load` gives back what was stored, by name or into a given model."""

import json
import shutil
from pathlib import Path

import pytest
import timm
import torch
from demo_runs import SETTINGS, TINY, logits, quantize, timm_model
from runs import snapshot
from torch import Tensor, nn

import fimaq
from fimaq.data.demo import demo_model
from fimaq.errors import InputError


def test_a_stored_run_loads_with_bit_identical_logits(finished: fimaq.Run) -> None:
    assert finished.path is not None
    assert torch.equal(logits(fimaq.load(finished.path, model=demo_model())), logits(finished.model))


def test_a_loaded_model_moves_to_another_device_as_a_whole(finished: fimaq.Run) -> None:
    moved = fimaq.load(finished.path, model=demo_model()).to("meta")
    tensors = [t for m in moved.modules() for t in vars(m).values() if isinstance(t, torch.Tensor)]
    tensors += [*moved.parameters(), *moved.buffers()]
    assert all(tensor.is_meta for tensor in tensors)


def test_loading_does_not_read_the_weights_of_the_model_given(finished: fimaq.Run) -> None:
    assert finished.path is not None
    other = demo_model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.normal_()
    assert torch.equal(logits(fimaq.load(finished.path, model=other)), logits(finished.model))


def test_loading_a_run_of_an_unnamed_model_without_one_says_so(finished: fimaq.Run) -> None:
    assert finished.path is not None
    with pytest.raises(InputError, match="model="):
        fimaq.load(finished.path)


def test_loading_an_unfinished_run_says_so(unfinished: Path) -> None:
    with pytest.raises(InputError, match="incomplete"):
        fimaq.load(unfinished, model=demo_model())


def test_loading_into_another_architecture_is_refused(finished: fimaq.Run) -> None:
    assert finished.path is not None
    with pytest.raises(InputError):
        fimaq.load(finished.path, model=timm.create_model("vit_tiny_patch16_224", **TINY))


def test_a_run_of_an_earlier_format_is_not_loaded(finished: fimaq.Run, tmp_path: Path) -> None:
    assert finished.path is not None
    out = shutil.copytree(finished.path, tmp_path / "run")
    described = json.loads((out / "config.json").read_text())
    del described["digest"]
    (out / "config.json").write_text(json.dumps({**described, "format": described["format"] - 1}))
    with pytest.raises(InputError, match="format 1"):
        fimaq.load(out, model=demo_model())


def test_a_finished_run_is_not_overwritten(finished: fimaq.Run) -> None:
    assert finished.path is not None
    before = snapshot(finished.path)
    with pytest.raises(InputError, match="finished run"):
        quantize(out=finished.path)
    assert snapshot(finished.path) == before


def test_resuming_a_finished_run_gives_it_back(finished: fimaq.Run) -> None:
    assert finished.path is not None
    before = (finished.path / "model.safetensors").read_bytes()
    again = quantize(out=finished.path, resume=True)
    assert torch.equal(logits(again.model), logits(finished.model))
    assert (finished.path / "model.safetensors").read_bytes() == before


def test_a_finished_run_keeps_no_checkpoint(finished: fimaq.Run) -> None:
    assert finished.path is not None
    names = {path.name for path in finished.path.iterdir()} - {".lock"}
    assert names == {"config.json", "events.jsonl", "metrics.json", "model.safetensors"}


def store_by_name(model: nn.Module, out: Path) -> tuple[fimaq.Run, Tensor]:
    """Quantized with the arguments TINY, and the images it was calibrated with."""
    images = torch.randn(8, 3, 32, 32)
    settings = {**SETTINGS, "bits": "w6a6", "calib_size": 8, "batch_size": 8, "method": "rtn"}
    return fimaq.quantize(model, images, out=out, model_args=TINY, **settings), images


def test_a_timm_model_is_built_by_its_name_when_loaded(tmp_path: Path) -> None:
    run, images = store_by_name(timm_model(), tmp_path / "run")
    loaded = fimaq.load(tmp_path / "run")
    with torch.no_grad():
        assert torch.equal(loaded(images), run.model(images))


def test_how_images_were_made_is_stored_as_it_was_said(tmp_path: Path) -> None:
    images = torch.rand(8, 3, 32, 32)
    made = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0), "crop_pct": 1.0}
    settings = {**SETTINGS, "calib_size": 8, "batch_size": 8, "method": "rtn", "model_args": TINY}
    with pytest.raises(InputError, match="instead of 0 and 1"):
        fimaq.quantize(timm_model(), images + 9, out=tmp_path / "run", preprocessing=made, **settings)
    assert list(tmp_path.iterdir()) == []
    fimaq.quantize(timm_model(), images, out=tmp_path / "run", preprocessing=made, **settings)
    stored = json.loads((tmp_path / "run" / "config.json").read_text())["preprocessing"]
    assert stored["input_size"] == [3, 32, 32]
    assert {name: stored[name] for name in made} == {"mean": [0, 0, 0], "std": [1, 1, 1], "crop_pct": 1.0}


def test_a_model_whose_name_builds_something_else_is_not_loaded_by_name(tmp_path: Path) -> None:
    """The number of heads shows in no weight: a twin built by name has the same shapes and other outputs."""
    run, _ = store_by_name(timm_model(num_heads=4), tmp_path / "run")
    assert run.config.model is None
    with pytest.raises(InputError, match="model="):
        fimaq.load(tmp_path / "run")
