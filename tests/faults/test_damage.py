"""Files of a run directory that come back damaged: refused by name, or of no consequence; never loaded as good."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest
from command_line import World, assert_same_model, fimaq
from damage import Reading, attempt, damages
from tally import Tally

from fimaq.artifact.run_directory import RunDirectory

FINISHED = ("config.json", "metrics.json", "model.safetensors", "events.jsonl", ".lock")
UNFINISHED = (
    "config.json", "checkpoint/unit-000.safetensors", "checkpoint/unit-001.safetensors", "events.jsonl", ".lock"
)  # fmt: skip
WITHOUT_NUMBERS = ("events.jsonl", ".lock")
"""A log and a lock: no result depends on what they hold."""


def read_damaged(name: str, count: int, undisturbed: Path, folder: Path, tally: Tally) -> None:
    run = shutil.copytree(undisturbed, folder / "run")
    good, content = Reading(run), (run / name).read_bytes()
    refused = 0
    for what, damage in damages(content, count, random.Random(name)):
        (run / name).write_bytes(damage(content))
        tally.fault()
        message, reading = attempt(lambda: Reading(run))
        refused += message is not None
        right = str(run / name) in message if message is not None else reading == good
        tally.expect_right(right, f"{name}, {what}: {message or 'other results'}")
    assert refused == 0 if name in WITHOUT_NUMBERS else refused >= 0.9 * count


def resume_damaged(
    name: str, count: int, world: World, unfinished: Path, undisturbed: Path, folder: Path, tally: Tally
) -> None:
    content = (unfinished / name).read_bytes()
    for number, (what, damage) in enumerate(damages(content, count, random.Random(name))):
        run = shutil.copytree(unfinished, folder / f"run-{number}")
        (run / name).write_bytes(damage(content))
        tally.fault()
        outcome = fimaq(*world.quantize(run, "--resume"))
        if outcome.code == 0:
            assert_same_model(run, undisturbed)
        else:
            named = outcome.code == 2 and str(run / name) in outcome.err.splitlines()[-1]
            tally.expect_right(named, f"{name}, {what}: {outcome.err}")
            tally.expect_right(not (run / "model.safetensors").exists(), f"{name}, {what}: complete")
            (run / name).write_bytes(content)
            assert fimaq(*world.quantize(run, "--resume")).code == 0
            assert_same_model(run, undisturbed)
        shutil.rmtree(run)


@pytest.mark.parametrize("name", FINISHED)
def test_a_damaged_file_of_a_finished_run_is_refused_by_name(
    name: str, undisturbed: Path, tmp_path: Path, tally: Tally
) -> None:
    read_damaged(name, 15, undisturbed, tmp_path, tally)


@pytest.mark.slow
@pytest.mark.parametrize("name", FINISHED)
def test_a_file_of_a_finished_run_damaged_anywhere_is_refused_by_name(
    name: str, undisturbed: Path, tmp_path: Path, tally: Tally
) -> None:
    read_damaged(name, 400, undisturbed, tmp_path, tally)


@pytest.mark.parametrize("name", ["config.json", "checkpoint/unit-001.safetensors"])
def test_a_damaged_file_of_an_unfinished_run_is_refused_by_name(
    name: str, world: World, unfinished: Path, undisturbed: Path, tmp_path: Path, tally: Tally
) -> None:
    resume_damaged(name, 2, world, unfinished, undisturbed, tmp_path, tally)


@pytest.mark.slow
@pytest.mark.parametrize("name", UNFINISHED)
def test_a_file_of_an_unfinished_run_damaged_anywhere_is_refused_by_name(
    name: str, world: World, unfinished: Path, undisturbed: Path, tmp_path: Path, tally: Tally
) -> None:
    resume_damaged(name, 25, world, unfinished, undisturbed, tmp_path, tally)


@pytest.mark.parametrize("step", [101, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["config.json", "metrics.json"])
def test_no_flipped_bit_in_json_is_loaded_as_good(
    name: str, step: int, undisturbed: Path, tmp_path: Path, tally: Tally
) -> None:
    """What is not refused may differ in white space only."""
    run = shutil.copytree(undisturbed, tmp_path / "run")
    good = (run / name).read_bytes()

    def read() -> object:
        directory = RunDirectory.open_existing(run)
        return directory.config if name == "config.json" else directory.read_metrics()

    content, refused = read(), 0
    for position in range(0, 8 * len(good), step):
        damaged = bytearray(good)
        damaged[position // 8] ^= 1 << (position % 8)
        (run / name).write_bytes(damaged)
        message, found = attempt(read)
        tally.fault()
        refused += message is not None
        right = f"{name} is damaged" in message if message is not None else found == content
        tally.expect_right(right, f"bit {position} of {name}: {message}")
    assert refused > 0.8 * 8 * len(good) / step


@pytest.mark.parametrize("name", FINISHED)
def test_a_missing_file_of_a_finished_run_is_named_or_of_no_consequence(
    name: str, undisturbed: Path, tmp_path: Path, tally: Tally
) -> None:
    run = shutil.copytree(undisturbed, tmp_path / "run")
    good = Reading(run)
    os.remove(run / name)
    tally.fault()
    message, reading = attempt(lambda: Reading(run))
    right = reading == good if name in WITHOUT_NUMBERS else name in str(message)
    tally.expect_right(right, f"{name}: {message}")


def test_a_run_without_digests_in_its_json_still_loads(undisturbed: Path, tmp_path: Path) -> None:
    """As runs were written before."""
    run = shutil.copytree(undisturbed, tmp_path / "run")
    for name in ("config.json", "metrics.json"):
        content = json.loads((run / name).read_text())
        del content["digest"]
        (run / name).write_text(json.dumps(content))
    assert Reading(run) == Reading(undisturbed)


def test_files_of_another_run_are_not_mixed_in(
    world: World, unfinished: Path, undisturbed: Path, tmp_path: Path, tally: Tally
) -> None:
    """Each is whole in itself: only what it says of itself tells that it does not belong here."""
    run = shutil.copytree(unfinished, tmp_path / "run")
    first, second = (run / "checkpoint" / f"unit-{number:03d}.safetensors" for number in (0, 1))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    tally.fault()
    outcome = fimaq(*world.quantize(run, "--resume"))
    tally.expect_right(outcome.code == 2, "a unit was taken for another")
    first.write_bytes(content)
    assert fimaq(*world.quantize(run, "--resume")).code == 0
    assert_same_model(run, undisturbed)
