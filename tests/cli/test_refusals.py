"""Bad input: exit 2, one line that says why, nothing written."""

import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from command_line import ARGUMENTS, CLASSES, MODEL, World, assert_refused, fimaq, fimaq_process, truncate
from runs import snapshot
from safetensors.torch import load_file, save_file


class Spy:
    """Unpickling it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def changed_weights(world: World, tmp_path: Path, value: float) -> Path:
    state = load_file(world.weights)
    state["blocks.1.mlp.fc1.weight"][0, 0] = value
    save_file(state, tmp_path / "changed.safetensors")
    return tmp_path / "changed.safetensors"


def weights_of_another_model(tmp_path: Path) -> Path:
    save_file(timm.create_model(MODEL, **{**ARGUMENTS, "depth": 1}).state_dict(), tmp_path / "other.safetensors")
    return tmp_path / "other.safetensors"


def torch_file(tmp_path: Path, content: Any) -> Path:
    torch.save(content, tmp_path / "weights.pth")
    return tmp_path / "weights.pth"


def bytes_file(tmp_path: Path, name: str, content: bytes) -> Path:
    (tmp_path / name).write_bytes(content)
    return tmp_path / name


def folder_in(tmp_path: Path, name: str) -> Path:
    (tmp_path / name).mkdir(parents=True)
    return tmp_path / name


Change = Callable[[World, Path], dict[str, Any]]
REFUSED: dict[str, tuple[Change, list[str]]] = {
    "no images": (lambda w, t: {"data": None}, ["--data", "--calib"]),
    "missing data folder": (lambda w, t: {"data": t / "absent"}, ["absent"]),
    "data folder without train": (lambda w, t: {"data": folder_in(t, "bare")}, ["bare", "train"]),
    "missing calibration folder": (lambda w, t: {"data": None, "calib": t / "absent"}, ["absent"]),
    "empty calibration folder": (
        lambda w, t: {"data": None, "calib": folder_in(t, "bare")},
        ["bare", "no images"],
    ),
    "calibration folder is a file": (lambda w, t: {"data": None, "calib": w.weights}, ["not a folder"]),
    "missing validation folder": (lambda w, t: {"val": t / "absent"}, ["absent"]),
    "empty validation folder": (lambda w, t: {"val": folder_in(t, "bare")}, ["bare"]),
    "too few images": (lambda w, t: {"calib_size": 11}, ["11", "10"]),
    "batch larger than calibration set": (lambda w, t: {"batch_size": 9}, ["9", "8"]),
    "rank larger than iters": (lambda w, t: {"rank": 4}, ["rank 4", "iters 3"]),
    "bits out of range": (lambda w, t: {"bits": "w9a4"}, ["w9a4", "2 to 8"]),
    "bits of one": (lambda w, t: {"bits": "w1a8"}, ["w1a8"]),
    "bits unreadable": (lambda w, t: {"bits": "4"}, ["'4'", "w4a4"]),
    "unknown method": (lambda w, t: {"method": "magic"}, ["magic", "fima-q"]),
    "unknown preset": (lambda w, t: {"preset": "magic"}, ["magic", "deploy"]),
    "no iterations": (lambda w, t: {"iters": 0}, ["iters"]),
    "no calibration images": (lambda w, t: {"calib_size": 0}, ["calib_size"]),
    "alpha above one": (lambda w, t: {"alpha": 1.5}, ["alpha", "1.5"]),
    "negative damping": (lambda w, t: {"damping": -0.1}, ["damping", "-0.1"]),
    "alpha not a number": (lambda w, t: {"alpha": "nan"}, ["alpha"]),
    "crop of nothing": (lambda w, t: {"crop_pct": 0}, ["crop_pct"]),
    "negative seed": (lambda w, t: {"seed": -1}, ["seed"]),
    "unknown device": (lambda w, t: {"device": "abacus"}, ["abacus", "cpu"]),
    "missing weights": (lambda w, t: {"weights": t / "absent.safetensors"}, ["absent.safetensors"]),
    "weights of another architecture": (
        lambda w, t: {"weights": weights_of_another_model(t)},
        ["other.safetensors", "does not fit", "--model-arg"],
    ),
    "NaN in weights": (
        lambda w, t: {"weights": changed_weights(w, t, float("nan"))},
        ["NaN", "blocks.1.mlp.fc1.weight"],
    ),
    "Inf in weights": (
        lambda w, t: {"weights": changed_weights(w, t, float("inf"))},
        ["Inf", "blocks.1.mlp.fc1.weight"],
    ),
    "damaged safetensors": (
        lambda w, t: {"weights": bytes_file(t, "a.safetensors", b"\1" * 50)},
        ["a.safetensors"],
    ),
    "empty torch file": (lambda w, t: {"weights": bytes_file(t, "a.pth", b"")}, ["a.pth"]),
    "text as torch file": (lambda w, t: {"weights": bytes_file(t, "a.pth", b"hello, world")}, ["a.pth"]),
    "torch file of numbers": (lambda w, t: {"weights": torch_file(t, {"a": 1})}, ["weights.pth"]),
    "torch file with numbers as keys": (
        lambda w, t: {"weights": torch_file(t, {0: torch.zeros(1)})},
        ["weights.pth"],
    ),
    "class map missing": (lambda w, t: {"class_map": t / "absent.json"}, ["absent.json"]),
    "class map not JSON": (lambda w, t: {"class_map": bytes_file(t, "map.json", b"{")}, ["map.json"]),
    "class map out of range": (
        lambda w, t: {"class_map": bytes_file(t, "map.json", b'{"0": 0, "1": 1, "2": 2, "3": 4}')},
        ["map.json", "3: 4"],
    ),
    "class map without a folder": (
        lambda w, t: {"class_map": bytes_file(t, "map.json", b'{"0": 0}')},
        ["map.json"],
    ),
    "missing configuration file": (lambda w, t: {"config": t / "absent.yaml"}, ["absent.yaml"]),
    "model argument without a value": (lambda w, t: {"model_arg": "depth"}, ["--model-arg", "'depth'"]),
    "model argument without a name": (lambda w, t: {"model_arg": "=3"}, ["--model-arg", "'=3'"]),
    "unknown model argument": (lambda w, t: {"model_arg": "colour=3"}, ["colour"]),
    "impossible model argument": (lambda w, t: {"model_arg": "patch_size=0"}, ["patch_size"]),
    "model without classes": (lambda w, t: {"num_classes": 0}, ["num_classes"]),
}


@pytest.mark.parametrize("what", list(REFUSED))
def test_refused_with_one_line_and_nothing_written(world: World, tmp_path: Path, what: str) -> None:
    change, named = REFUSED[what]
    outcome = fimaq(*world.quantize(tmp_path / "runs" / "run", **change(world, tmp_path)))
    assert_refused(outcome, *named)
    assert not (tmp_path / "runs").exists()


def test_a_refusal_in_a_process_of_its_own_shows_no_traceback(world: World, tmp_path: Path) -> None:
    outcome = fimaq_process(*world.quantize(tmp_path / "run", bits="w9a9"))
    assert_refused(outcome, "w9a9")
    assert outcome.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_unreadable_images_do_not_count_as_calibration_images(world: World, tmp_path: Path) -> None:
    calib = shutil.copytree(world.data / "train", tmp_path / "calib")
    truncate(calib / "03.jpg")
    truncate(calib / "07.jpg")
    outcome = fimaq(*world.quantize(tmp_path / "run", data=None, calib=calib, calib_size=9))
    assert_refused(outcome, "9 calibration images", "holds 10", "2 cannot be read", "at most 8")
    assert not (tmp_path / "run").exists()


def test_a_pickle_is_refused_and_not_executed(world: World, tmp_path: Path) -> None:
    weights, trace = tmp_path / "evil.pth", tmp_path / "executed"
    weights.write_bytes(pickle.dumps({"head.bias": Spy(trace)}))
    outcome = fimaq(*world.quantize(tmp_path / "run", weights=weights))
    assert_refused(outcome, "evil.pth", "nothing in it was executed")
    assert not trace.exists()
    assert not (tmp_path / "run").exists()


def test_cuda_without_cuda_is_refused(
    world: World, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert_refused(fimaq(*world.quantize(tmp_path / "run", device="cuda")), "cuda", "--device cpu")
    assert not (tmp_path / "run").exists()
    assert_refused(fimaq("evaluate", finished, "--data", world.data, "--device", "cuda"), "--device cpu")


def test_an_unknown_model_is_refused_with_similar_names(world: World, tmp_path: Path) -> None:
    line = world.quantize(tmp_path / "run")
    outcome = fimaq("quantize", "vit_tinny_patch16_224", *line[2:])
    assert_refused(outcome, "vit_tinny_patch16_224", "similar", MODEL)
    assert not (tmp_path / "run").exists()


def test_an_output_path_that_is_a_file_is_refused(world: World, tmp_path: Path) -> None:
    out = bytes_file(tmp_path, "notes.txt", b"mine")
    assert_refused(fimaq(*world.quantize(out)), "notes.txt")
    assert_refused(fimaq(*world.quantize(out / "run")), "notes.txt")
    assert out.read_bytes() == b"mine"


def test_a_folder_of_other_things_is_not_written_into(world: World, tmp_path: Path) -> None:
    out = folder_in(tmp_path, "home")
    bytes_file(out, "thesis.tex", b"mine")
    for more in ((), ("--resume",)):
        assert_refused(fimaq(*world.quantize(out, *more)), "home", "thesis.tex")
    assert snapshot(out) == {"thesis.tex": b"mine"}


def test_validation_images_of_which_none_can_be_read_are_refused_first(world: World, tmp_path: Path) -> None:
    val = folder_in(tmp_path, "val/0")
    truncate(Path(shutil.copy(world.data / "val" / "0" / "0.jpg", val)))
    outcome = fimaq(*world.quantize(tmp_path / "run", val=val.parent, method="rtn"))
    assert_refused(outcome)
    assert not (tmp_path / "run").exists()


def test_a_model_that_cannot_be_quantized_completely_leaves_no_directory(world: World, tmp_path: Path) -> None:
    model = timm.create_model("mvitv2_tiny", num_classes=CLASSES)
    save_file(model.state_dict(), tmp_path / "mvit.safetensors")
    line = ["quantize", "mvitv2_tiny", "--data", world.data, "--weights", tmp_path / "mvit.safetensors"]
    line += ["--num-classes", "4", "--calib-size", "8", "--batch-size", "4", "--device", "cpu"]
    outcome = fimaq(*line, "--out", tmp_path / "run")
    assert_refused(outcome, "--allow-float")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("missing", ["--out", "MODEL"])
def test_a_command_line_with_something_missing_is_refused(world: World, tmp_path: Path, missing: str) -> None:
    line = world.quantize(tmp_path / "run")
    if missing == "MODEL":
        del line[1]
    else:
        at = line.index("--out")
        del line[at : at + 2]
    outcome = fimaq(*line)
    assert outcome.code == 2
    assert outcome.out == ""
    assert missing.lower() in outcome.err.lower()
    assert not (tmp_path / "run").exists()


def test_curves_without_their_package_are_refused_before_anything_is_read(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    outcome = fimaq(*world.quantize(tmp_path / "run", "--tensorboard", weights=tmp_path / "absent"))
    assert_refused(outcome, "pip install 'fimaq[tensorboard]'")
    assert len(outcome.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
