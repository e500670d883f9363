"""Validation folders that are mapped to classes, or refused."""

import json
import shutil
from pathlib import Path

import pytest
from command_line import CLASSES, World, assert_refused, evaluate, fimaq, run_to_evaluate
from runs import snapshot


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
