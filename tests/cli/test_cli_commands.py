"""The `fimaq` command as a user meets it: exit codes, what goes to which stream, and what is left on disk."""

import contextlib
import errno
import io
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from timm.data import create_transform

from fimaq import cli
from fimaq.catalogue import METHODS
from fimaq.reconstruct.algorithm import Reconstruction
from fimaq.version import __version__

MODEL = "vit_tiny_patch16_224"
ARGUMENTS = {"img_size": 32, "depth": 2, "embed_dim": 24, "num_heads": 2}
CLASSES = 4
COLOURS = ((220, 30, 30), (30, 200, 40), (40, 60, 210), (200, 190, 40))
PATIENCE = 60.0
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Outcome:
    code: Any
    out: str
    err: str


def fimaq(*arguments: str | Path) -> Outcome:
    """The command in this process; an exception that escapes it (a traceback to the user) escapes here too."""
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["fimaq", *map(str, arguments)])
        patch.setattr(cli.app, "registered_commands", [])  # main() registers them each time
        patch.setenv("COLUMNS", "200")
        patch.setenv("HF_HUB_OFFLINE", "1")
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
    return Outcome(code, out.getvalue(), err.getvalue())


def fimaq_process(*arguments: str | Path) -> Outcome:
    """The command as its own process."""
    command = [sys.executable, "-m", "fimaq", *map(str, arguments)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    return Outcome(done.returncode, done.stdout, done.stderr)


# The world: one tiny model, a few images


def write_image(path: Path, colour: tuple[int, int, int], generator: np.random.Generator) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.asarray(colour) + generator.integers(-30, 31, (32, 32, 3))
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=95)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:150])


def tiny_model() -> torch.nn.Module:
    """Weights of visible size, so that different images get different classes."""
    model = timm.create_model(MODEL, num_classes=CLASSES, **ARGUMENTS).eval()
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


@dataclass(frozen=True)
class World:
    """Paths that every test reads and none writes."""

    weights: Path
    data: Path
    """train/ with 10 images and val/0 ... val/3 with 3 images each."""

    def quantize(self, out: Path, *more: str | Path, **changed: Any) -> list[str | Path]:
        """Arguments of a quick run. `changed`: another value for an option, None to leave it out."""
        options: dict[str, Any] = {
            "weights": self.weights,
            "data": self.data,
            "num_classes": CLASSES,
            "iters": 3,
            "calib_size": 8,
            "batch_size": 4,
            "device": "cpu",
            "out": out,
            **changed,
        }
        line: list[str | Path] = ["quantize", MODEL]
        for name, value in options.items():
            if value is not None:
                line += [f"--{name.replace('_', '-')}", str(value)]
        for name, value in ARGUMENTS.items():
            line += ["--model-arg", f"{name}={value}"]
        return [*line, *more]


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    save_file(tiny_model().state_dict(), folder / "tiny.safetensors")
    generator = np.random.default_rng(0)
    for number in range(10):
        write_image(folder / "data" / "train" / f"{number:02d}.jpg", COLOURS[number % 4], generator)
    for label in range(CLASSES):
        for number in range(3):
            write_image(folder / "data" / "val" / str(label) / f"{number}.jpg", COLOURS[label], generator)
    return World(folder / "tiny.safetensors", folder / "data")


@pytest.fixture(scope="session")
def finished(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, for tests that leave it as it is; those that evaluate it copy it."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("runs") / "finished"
    outcome = fimaq(*world.quantize(out))
    assert outcome.code == 0, outcome.err
    return out


@pytest.fixture(scope="session")
def unfinished(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, interrupted before its third unit."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("runs") / "unfinished"
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at_unit(2, patch)
        assert fimaq(*world.quantize(out)).code == 130
    return out


def interrupt_at_unit(number: int, patch: pytest.MonkeyPatch) -> None:
    reconstruct = Reconstruction.reconstruct

    def interrupted(self: Reconstruction, index: int, report: Any) -> Any:
        if index == number:
            raise KeyboardInterrupt
        return reconstruct(self, index, report)

    patch.setattr(Reconstruction, "reconstruct", interrupted)


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_refused(outcome: Outcome, *named: str) -> None:
    """Exit 2 and one line that says why, the last; what stands before it are notes on the work."""
    assert outcome.code == 2, outcome
    lines = outcome.err.splitlines()
    assert [line for line in lines if line.startswith("fimaq:")] == lines[-1:], outcome.err
    assert "Traceback" not in outcome.err
    assert outcome.out == ""
    for text in named:
        assert text in lines[-1]


def assert_same_model(one: Path, two: Path) -> None:
    """Equal tensors and metadata; safetensors writes metadata in any order, so bytes may differ."""
    first, second = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    with safe_open(one / "model.safetensors", "pt") as this, safe_open(two / "model.safetensors", "pt") as other:
        assert this.metadata() == other.metadata()


# Quantize, then evaluate


def test_quantize_then_evaluate_in_processes_of_their_own(world: World, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "run"
    quantized = fimaq_process(*world.quantize(out, "--json"))
    assert quantized.code == 0, quantized.err
    assert quantized.out.count("\n") == 1
    written = json.loads(quantized.out)
    assert written["run"] == str(out)
    assert written["accuracy"]["images"] == 12
    assert "unit 4/4 head" in quantized.err
    assert {path.name for path in out.iterdir()} - {".lock"} == {
        "config.json",
        "events.jsonl",
        "metrics.json",
        "model.safetensors",
    }

    evaluated = fimaq_process("evaluate", out, "--data", world.data, "--device", "cpu", "--json")
    assert evaluated.code == 0, evaluated.err
    assert evaluated.out.count("\n") == 1
    result = json.loads(evaluated.out)
    for name in ("full_precision", "quantized"):
        assert result[name].keys() == {"top1", "top5"}
        assert 0 <= result[name]["top1"] <= result[name]["top5"] == 100.0  # five guesses at four classes
        assert result[name] == written["accuracy"][name]
    assert json.loads((out / "metrics.json").read_text())["accuracy"] == result


def evaluate(run: Path, *arguments: str | Path) -> dict[str, Any]:
    outcome = fimaq("evaluate", run, "--device", "cpu", "--json", *arguments)
    assert outcome.code == 0, outcome.err
    result: dict[str, Any] = json.loads(outcome.out)
    return result


def run_to_evaluate(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def test_full_precision_accuracy_is_what_timm_itself_gives(world: World, finished: Path, tmp_path: Path) -> None:
    transform = create_transform(
        input_size=(3, 32, 32), interpolation="bicubic", crop_pct=0.9, mean=(0.5,) * 3, std=(0.5,) * 3
    )
    model = tiny_model()
    right = []
    for path in sorted((world.data / "val").rglob("*.jpg")):
        with Image.open(path) as image, torch.no_grad():
            right.append(int(model(transform(image)[None]).argmax()) == int(path.parent.name))
    assert 0 < sum(right) < len(right), "an accuracy of 0 or 100 would show little"
    result = evaluate(run_to_evaluate(finished, tmp_path), "--data", world.data)
    assert result["full_precision"]["top1"] == pytest.approx(100 * np.mean(right), abs=0.001)


def test_without_json_both_accuracies_are_shown(world: World, finished: Path, tmp_path: Path) -> None:
    outcome = fimaq("evaluate", run_to_evaluate(finished, tmp_path), "--data", world.data, "--device", "cpu")
    assert outcome.code == 0
    assert re.search(r"full precision +\d+\.\d\d +100\.00", outcome.out)
    assert re.search(r"quantized +\d+\.\d\d +100\.00", outcome.out)
    assert "percent of 12 images" in outcome.out


def test_evaluate_leaves_full_precision_out_where_its_weights_are_gone(world: World, tmp_path: Path) -> None:
    weights = shutil.copy(world.weights, tmp_path / "tiny.safetensors")
    out = tmp_path / "run"
    assert fimaq(*world.quantize(out, weights=weights, method="rtn")).code == 0
    os.remove(weights)
    outcome = fimaq("evaluate", out, "--data", world.data, "--device", "cpu", "--json")
    assert outcome.code == 0
    assert "full precision is left out" in outcome.err
    assert json.loads(outcome.out).keys() >= {"quantized"}
    assert "full_precision" not in json.loads(outcome.out)
    assert "full_precision" in evaluate(out, "--data", world.data, "--weights", world.weights)


def test_weights_other_than_those_of_the_run_are_not_compared(
    world: World, finished: Path, tmp_path: Path
) -> None:
    run = run_to_evaluate(finished, tmp_path)
    state = load_file(world.weights)
    state["head.bias"] += 1
    save_file(state, tmp_path / "other.safetensors")
    before = snapshot(run)
    outcome = fimaq("evaluate", run, "--data", world.data, "--weights", tmp_path / "other.safetensors")
    assert_refused(outcome, "other.safetensors", "not those")
    assert snapshot(run) == before


def test_unreadable_validation_images_are_counted_not_guessed(
    world: World, finished: Path, tmp_path: Path
) -> None:
    val = shutil.copytree(world.data / "val", tmp_path / "val")
    truncate(val / "1" / "0.jpg")
    truncate(val / "2" / "2.jpg")
    result = evaluate(run_to_evaluate(finished, tmp_path), "--val", val)
    assert (result["images"], result["unreadable"]) == (10, 2)


def test_truncated_calibration_images_are_skipped_with_a_count(world: World, tmp_path: Path) -> None:
    calib = shutil.copytree(world.data / "train", tmp_path / "calib")
    for number in range(7):  # of 17 images 7 cannot be read: whichever 10 are drawn first, some are met
        truncate(Path(shutil.copy(calib / f"{number:02d}.jpg", calib / f"broken{number}.jpg")))
    outcome = fimaq(*world.quantize(tmp_path / "run", data=None, calib=calib, calib_size=10, method="rtn"))
    assert outcome.code == 0, outcome.err
    found = re.search(r"unreadable images skipped: (\d+), such as .*(broken\d\.jpg)", outcome.err)
    assert found is not None
    assert 1 <= int(found[1]) <= 7
    assert json.loads((tmp_path / "run" / "config.json").read_text())["data"]["images"] == 10


def test_the_note_on_skipped_images_is_written_for_people(world: World, tmp_path: Path) -> None:
    calib = shutil.copytree(world.data / "train", tmp_path / "calib")
    for number in range(7):
        truncate(Path(shutil.copy(calib / f"{number:02d}.jpg", calib / f"broken{number}.jpg")))
    outcome = fimaq(*world.quantize(tmp_path / "run", data=None, calib=calib, calib_size=10, method="rtn"))
    assert "skipped" in outcome.err
    assert "PosixPath" not in outcome.err


# Classes


def named_folders(world: World, tmp_path: Path) -> Path:
    """Two class folders of the four, under names that say nothing about the index."""
    for label, name in (("1", "cat"), ("3", "dog")):
        shutil.copytree(world.data / "val" / label, tmp_path / "named" / name)
    return tmp_path / "named"


def test_folders_that_cannot_be_mapped_are_refused_by_quantize(world: World, tmp_path: Path) -> None:
    outcome = fimaq(*world.quantize(tmp_path / "run", val=named_folders(world, tmp_path)))
    assert_refused(outcome, "--class-map", "cat", "dog")
    assert not (tmp_path / "run").exists()


def test_folders_that_cannot_be_mapped_are_refused_by_evaluate(
    world: World, finished: Path, tmp_path: Path
) -> None:
    before = snapshot(finished)
    assert_refused(fimaq("evaluate", finished, "--val", named_folders(world, tmp_path)), "--class-map", "cat")
    assert snapshot(finished) == before


def test_a_class_map_gives_folders_their_classes(world: World, finished: Path, tmp_path: Path) -> None:
    """Every image has one predicted class: over the four ways to label all of them, top-1 adds up to 100 %."""
    run, val, file = run_to_evaluate(finished, tmp_path), named_folders(world, tmp_path), tmp_path / "map.json"
    total = {"full_precision": 0.0, "quantized": 0.0}
    for label in range(CLASSES):
        file.write_text(json.dumps({"cat": label, "dog": label}))
        result = evaluate(run, "--val", val, "--class-map", file)
        for name in total:
            total[name] += result[name]["top1"]
    assert total == pytest.approx({"full_precision": 100.0, "quantized": 100.0}, abs=0.01)


def test_quantize_takes_a_class_map(world: World, tmp_path: Path) -> None:
    file = tmp_path / "map.json"
    file.write_text('{"cat": 1, "dog": 3}')
    line = world.quantize(
        tmp_path / "run", "--json", val=named_folders(world, tmp_path), class_map=file, method="rtn"
    )
    outcome = fimaq(*line)
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["accuracy"]["images"] == 6


# A configuration file


def test_flags_win_over_the_configuration_file(world: World, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"data: {world.data}\nbits: w3a3\nmethod: rtn\ncalib-size: 6\nmodel_args: {ARGUMENTS}\n")
    line = ["quantize", MODEL, "--weights", world.weights, "--num-classes", "4", "--out", tmp_path / "run"]
    outcome = fimaq(*line, "--config", file, "--bits", "w6a6", "--batch-size", "4", "--device", "cpu")
    assert outcome.code == 0, outcome.err
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    settings = stored["settings"]
    assert (settings["bits"], settings["method"], settings["calib_size"]) == ("w6a6", "rtn", 6)
    assert stored["model"]["args"] == ARGUMENTS


def test_an_unknown_key_in_the_configuration_file_is_refused(world: World, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("itters: 5\n")
    assert_refused(fimaq(*world.quantize(tmp_path / "run", "--config", tmp_path / "run.yaml")), "itters")
    assert not (tmp_path / "run").exists()


def test_the_data_flag_wins_over_data_in_the_file(world: World, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("data: elsewhere\n")
    line = world.quantize(tmp_path / "run", "--config", tmp_path / "run.yaml", method="rtn")
    assert fimaq(*line).code == 0


def test_the_data_flag_wins_over_calib_in_the_file(world: World, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"calib: {world.data / 'val'}\n")
    line = world.quantize(tmp_path / "run", "--config", tmp_path / "run.yaml", method="rtn")
    assert fimaq(*line).code == 0
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert stored["given"]["calib"] == str(world.data / "train")


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("bits: [w4a4\nx: }", id="not YAML"),
        pytest.param("- bits\n- w4a4\n", id="a list"),
        pytest.param("bits: 4\n", id="bits of another type"),
        pytest.param("data: 5\n", id="data is a number"),
        pytest.param("data:\n", id="data is empty"),
    ],
)
def test_a_bad_configuration_file_is_refused(world: World, tmp_path: Path, content: str) -> None:
    (tmp_path / "run.yaml").write_text(content)
    outcome = fimaq(*world.quantize(tmp_path / "run", "--config", tmp_path / "run.yaml", data=None))
    assert_refused(outcome)
    assert not (tmp_path / "run").exists()


# Refusals


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


# Runs that are there already


def test_a_finished_run_is_refused_and_unchanged(world: World, finished: Path) -> None:
    before = snapshot(finished)
    assert_refused(fimaq(*world.quantize(finished)), str(finished), "finished")
    assert snapshot(finished) == before


def test_resuming_a_finished_run_keeps_its_model(world: World, finished: Path, tmp_path: Path) -> None:
    run = run_to_evaluate(finished, tmp_path)
    outcome = fimaq(*world.quantize(run, "--resume", "--json"))
    assert outcome.code == 0, outcome.err
    assert "nothing to do" in outcome.err
    assert json.loads(outcome.out)["accuracy"]["images"] == 12
    assert_same_model(run, finished)


def test_an_unfinished_run_is_not_restarted_unasked(world: World, unfinished: Path) -> None:
    before = snapshot(unfinished)
    assert_refused(fimaq(*world.quantize(unfinished)), "--resume")
    assert snapshot(unfinished) == before


@pytest.mark.parametrize(
    ("changed", "named"),
    [({"bits": "w3a3"}, "bits"), ({"seed": 1}, "seed"), ({"iters": 4}, "iters"), ({"crop_pct": 1.0}, "crop_pct")],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("state", ["finished", "unfinished"])
def test_a_run_of_another_configuration_is_refused(
    world: World, request: Any, state: str, changed: dict[str, Any], named: str
) -> None:
    run = request.getfixturevalue(state)
    out = shutil.copytree(run, request.getfixturevalue("tmp_path") / "run")
    before = snapshot(out)
    assert_refused(fimaq(*world.quantize(out, "--resume", **changed)), named)
    assert snapshot(out) == before


def test_evaluating_an_incomplete_run_is_refused(world: World, unfinished: Path) -> None:
    before = snapshot(unfinished)
    assert_refused(fimaq("evaluate", unfinished, "--data", world.data), "incomplete", "--resume")
    assert snapshot(unfinished) == before


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--data"),
        (["--data", "absent"], "absent"),
        (["--data", ".", "--crop-pct", "0"], "crop_pct"),
        (["--val", "WORLD/val", "--val-size", "0"], "0"),
        (["--val", "WORLD/val", "--weights", "absent.pth"], "absent.pth"),
        (["--val", "WORLD/val", "--class-map", "absent.json"], "absent.json"),
    ],
)
def test_evaluate_refuses_and_leaves_the_run_alone(
    world: World, finished: Path, arguments: list[str], named: str
) -> None:
    before = snapshot(finished)
    line = [text.replace("WORLD", str(world.data)) for text in arguments]
    assert_refused(fimaq("evaluate", finished, "--device", "cpu", *line), named)
    assert snapshot(finished) == before


def test_evaluating_what_is_no_run_is_refused(world: World, tmp_path: Path) -> None:
    assert_refused(fimaq("evaluate", tmp_path / "absent", "--data", world.data), "absent")
    assert not (tmp_path / "absent").exists()


# A full disk


@pytest.mark.parametrize("name", ["config.json", "unit-001.safetensors", "metrics.json", "model.safetensors"])
def test_a_full_disk_fails_with_the_file_named_and_can_be_resumed(
    world: World, finished: Path, tmp_path: Path, name: str
) -> None:
    out = tmp_path / "run"
    sync = os.fsync

    def full(handle: int) -> None:
        written = os.fstat(handle)
        if any(os.path.samestat(written, path.stat()) for path in out.rglob(f".{name}.*")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(handle)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", full)
        outcome = fimaq(*world.quantize(out, "--json"))
    assert outcome.code == 1
    assert outcome.out == ""
    assert "Traceback" not in outcome.err
    last = outcome.err.splitlines()[-1]
    assert last.startswith("fimaq:")
    assert name in last
    assert os.strerror(errno.ENOSPC) in last
    assert not (out / "model.safetensors").exists()
    assert not list(tmp_path.rglob("*.partial"))

    assert fimaq(*world.quantize(out, "--resume")).code == 0
    assert_same_model(out, finished)


# Interruption

LONG = 150
"""Iterations per unit: enough that a signal after the first unit comes before the last."""


@pytest.fixture(scope="session")
def uninterrupted(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("runs") / "uninterrupted"
    assert fimaq(*world.quantize(out, iters=LONG)).code == 0
    return out


@contextlib.contextmanager
def started(arguments: list[str | Path]) -> Iterator[subprocess.Popen[str]]:
    """The command as a process that can be interrupted, however this one was started."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fimaq", *map(str, arguments)],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def stop_after_first_unit(process: subprocess.Popen[str], out: Path, how: signal.Signals) -> Outcome:
    deadline = time.monotonic() + PATIENCE
    while not (out / "checkpoint" / "unit-000.safetensors").exists():
        assert process.poll() is None, "the run ended before its first unit was stored"
        assert time.monotonic() < deadline, "the first unit was never stored"
        time.sleep(0.002)
    process.send_signal(how)
    shown, err = process.communicate(timeout=PATIENCE)
    return Outcome(process.returncode, shown, err)


@pytest.mark.parametrize(("how", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_stopped_run_resumes_to_the_same_model(
    world: World, uninterrupted: Path, tmp_path: Path, how: signal.Signals, code: int
) -> None:
    out = tmp_path / "run"
    with started(world.quantize(out, "--json", iters=LONG)) as process:
        outcome = stop_after_first_unit(process, out, how)
    assert outcome.code == code, outcome.err
    assert outcome.out == ""
    assert "Traceback" not in outcome.err
    assert not (out / "model.safetensors").exists()
    assert_refused(fimaq("evaluate", out, "--data", world.data), "incomplete")

    resumed = fimaq(*world.quantize(out, "--resume", iters=LONG))
    assert resumed.code == 0, resumed.err
    assert "patch_embed: taken from the checkpoint" in resumed.err
    assert_same_model(out, uninterrupted)


def test_an_interrupted_run_says_how_to_go_on(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at_unit(1, monkeypatch)
    outcome = fimaq(*world.quantize(tmp_path / "run"))
    assert outcome.code == 130
    assert "--resume" in outcome.err.splitlines()[-1]


# Help, lists, version

OPTIONS = {
    "quantize": "--out --data --calib --val --weights --bits --method --preset --iters --rank --alpha "
    "--calib-size --val-size --batch-size --crop-pct --model-arg --num-classes --class-map --allow-float --device "
    "--precision --seed --config --resume --json w4a4 fima-q deploy 20000 1024",
    "evaluate": "--data --val --crop-pct --val-size --class-map --weights --batch-size --device --json",
    "demo": "--seed",
    "list": "models methods",
}


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.parametrize("command", OPTIONS)
def test_help_names_every_option(command: str) -> None:
    outcome = fimaq(command, "--help")
    assert outcome.code == 0
    words = set(re.findall(r"[\w-]+", plain(outcome.out)))
    assert set(OPTIONS[command].split()) - words == set()


def test_help_names_every_command() -> None:
    outcome = fimaq("--help")
    assert outcome.code == 0
    assert OPTIONS.keys() <= set(plain(outcome.out).split())


def test_methods_are_listed() -> None:
    outcome = fimaq("list", "methods")
    assert outcome.code == 0
    assert [line.split()[0] for line in outcome.out.splitlines()[1:]] == [name for name, _ in METHODS]


def test_models_are_listed() -> None:
    outcome = fimaq("list", "models")
    assert outcome.code == 0
    assert {"ViT", "DeiT", "Swin"} <= set(outcome.out.split())


def test_listed_model_names_are_whole_without_a_terminal() -> None:
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "COLUMNS"}
    command = [sys.executable, "-m", "fimaq", "list", "models"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert "swin_tiny_patch4_window7_224" in done.stdout
    assert "…" not in done.stdout


def test_an_unknown_list_is_refused() -> None:
    outcome = fimaq("list", "planets")
    assert outcome.code == 2
    assert "models" in outcome.err


def test_version() -> None:
    assert fimaq_process("--version") == Outcome(0, f"fimaq {__version__}\n", "")
