"""Quantize, then evaluate: what is measured, what is shown, what is counted."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from command_line import (
    ARGUMENTS,
    CLASSES,
    MODEL,
    World,
    assert_refused,
    evaluate,
    fimaq,
    fimaq_process,
    run_to_evaluate,
    tiny_model,
    truncate,
)
from PIL import Image
from runs import snapshot
from safetensors.torch import load_file, save_file
from timm.data import create_transform

from fimaq.accuracy import Pairs
from fimaq.models import build


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


def test_a_divergence_that_is_no_number_is_null_in_json(
    world: World, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pairs, "as_dict", lambda _: {"kl_divergence": float("nan")})
    assert evaluate(run_to_evaluate(finished, tmp_path), "--data", world.data)["kl_divergence"] is None


def test_without_json_both_accuracies_are_shown(world: World, finished: Path, tmp_path: Path) -> None:
    outcome = fimaq("evaluate", run_to_evaluate(finished, tmp_path), "--data", world.data, "--device", "cpu")
    assert outcome.code == 0
    assert re.search(r"full precision +\d+\.\d\d +100\.00", outcome.out)
    assert re.search(r"quantized +\d+\.\d\d +100\.00", outcome.out)
    assert "percent of 12 images" in outcome.out


def test_brackets_in_the_name_of_a_run_are_shown(world: World, tmp_path: Path) -> None:
    out = tmp_path / "exp[w4a4]" / "runs[" / "w4]"
    outcome = fimaq(*world.quantize(out, method="rtn", val=None))
    assert outcome.code == 0, outcome.err
    assert f"{out} is complete" in outcome.out


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


def test_pretrained_weights_that_nobody_named_are_left_out_where_they_are_not_those_of_the_run(
    world: World, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_to_evaluate(finished, tmp_path)
    config = json.loads((run / "config.json").read_text())
    config["given"]["weights"] = None
    del config["digest"]
    (run / "config.json").write_text(json.dumps(config))
    fetched = timm.create_model(MODEL, num_classes=CLASSES, **ARGUMENTS)
    monkeypatch.setattr(build, "build_architecture", lambda *_, **__: fetched)
    outcome = fimaq("evaluate", run, "--data", world.data, "--device", "cpu", "--json")
    assert outcome.code == 0, outcome.err
    assert "full precision is left out: the run was not made from timm's pretrained weights" in outcome.err
    assert "full_precision" not in json.loads(outcome.out)


def test_damaged_metrics_are_found_before_the_work(world: World, finished: Path, tmp_path: Path) -> None:
    run = run_to_evaluate(finished, tmp_path)
    (run / "metrics.json").write_text("{")
    outcome = fimaq("evaluate", run, "--data", world.data, "--device", "cpu")
    assert_refused(outcome, "metrics.json is damaged")
    assert "validation" not in outcome.err


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


def test_without_a_terminal_each_unit_gets_a_line_and_curves_are_written(world: World, tmp_path: Path) -> None:
    outcome = fimaq(*world.quantize(tmp_path / "run", "--tensorboard", val=None))
    assert outcome.code == 0, outcome.err
    done = [line for line in outcome.err.splitlines() if ": done, " in line]
    assert [line.split(":")[0] for line in done] == [
        "unit 1/4 patch_embed",
        "unit 2/4 blocks.0",
        "unit 3/4 blocks.1",
        "unit 4/4 head",
    ]
    facts = r"iteration 3/3, loss \d+\.\d{4}, [\d.]+ it/s, (--|\d+:\d\d) left, \d+:\d\d elapsed, [\d.]+ GiB"
    assert all(re.search(facts, line) for line in done), done
    assert list((tmp_path / "run" / "tensorboard").iterdir())
