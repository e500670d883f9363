"""Runs that are there already, finished, unfinished or damaged; and a full disk."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import World, assert_refused, assert_same_model, fimaq, run_to_evaluate
from runs import snapshot


def test_a_finished_run_is_refused_and_unchanged(world: World, finished: Path) -> None:
    before = snapshot(finished)
    outcome = fimaq(*world.quantize(finished))
    assert_refused(outcome, str(finished), "finished")
    assert len(outcome.err.splitlines()) == 1, "a model or images were read first"
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
    outcome = fimaq(*world.quantize(unfinished))
    assert_refused(outcome, "--resume")
    assert len(outcome.err.splitlines()) == 1, "a model or images were read first"
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
