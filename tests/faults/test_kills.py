"""Processes killed, terminated and interrupted at any moment: resuming ends with the same bits."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from child import PLACES, KillAt, places_visited, start
from command_line import PATIENCE, World, assert_same_model, fimaq
from tally import Tally

KILLS_PER_PLACE = 3
KILLS_AT_ANY_TIME = 24
QUICK = (
    "an image is read",
    "ranges are searched",
    "a step of reconstruction",
    "a file gets its name",
    "the checkpoint is removed",
)
"""Places that the default run tries, once each."""


@pytest.fixture(scope="session")
def visits(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    folder = tmp_path_factory.mktemp("counted")
    counted = places_visited(world.quantize(folder / "run"), folder / "log")
    assert counted.keys() == PLACES.keys(), "a place that no run comes to is no test"
    return counted


@pytest.fixture(scope="session")
def seconds(world: World, tmp_path_factory: pytest.TempPathFactory) -> float:
    """How long an undisturbed process takes."""
    folder = tmp_path_factory.mktemp("timed")
    began = time.monotonic()
    process = start(world.quantize(folder / "run"), folder / "log")
    process.join(PATIENCE)
    assert process.exitcode == 0
    return time.monotonic() - began


def units_stored(out: Path) -> int:
    return len(list((out / "checkpoint").glob("unit-*.safetensors")))


def units_begun(out: Path) -> int:
    """Units that had come to a report of their loss when the process was killed."""
    path = out / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("}")]
    return len({event["index"] for event in events if event["kind"] == "progress"})


def resume_and_judge(world: World, out: Path, undisturbed: Path, tally: Tally, what: str) -> None:
    """After a fault: nothing incomplete is taken for a run, and resuming loses one unit at most."""
    complete, stored = (out / "model.safetensors").exists(), units_stored(out)
    tally.expect_kept(complete or units_begun(out) <= stored + 1, f"{what}: more than one unit is lost")
    if not complete:
        tally.expect_right(fimaq("evaluate", out, "--data", world.data).code == 2, f"{what}: taken for complete")
    resumed = fimaq(*world.quantize(out, "--resume"))
    tally.expect_kept(resumed.code == 0, f"{what}: cannot be resumed: {resumed.err}")
    if resumed.code == 0:
        reused = resumed.err.count("taken from the checkpoint")
        tally.expect_kept(complete or reused == stored, f"{what}: {reused} of {stored} units were reused")
        assert_same_model(out, undisturbed)
        assert "accuracy" in json.loads((out / "metrics.json").read_text())
        assert not (out / "checkpoint").exists()


def kill_at(
    place: str, number: int, after: bool, world: World, undisturbed: Path, folder: Path, tally: Tally
) -> None:
    out, log = folder / f"run-{number}-{after}", folder / "log"
    process = start(world.quantize(out), log, KillAt(place, number, after))
    process.join(PATIENCE)
    assert process.exitcode == -signal.SIGKILL, log.read_text()
    tally.fault(kill=True)
    resume_and_judge(world, out, undisturbed, tally, f"killed at visit {number} to: {place}")


@pytest.mark.parametrize("place", QUICK)
def test_a_killed_run_resumes_to_the_same_bits(
    place: str, world: World, visits: dict[str, int], undisturbed: Path, tmp_path: Path, tally: Tally
) -> None:
    # Images are read ahead by threads, so that two runs may read a few more or fewer of them.
    number = random.Random(place).randint(1, max(1, visits[place] // 2))
    kill_at(place, number, False, world, undisturbed, tmp_path, tally)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_a_run_killed_at_every_place_resumes_to_the_same_bits(
    place: str, world: World, visits: dict[str, int], undisturbed: Path, tmp_path: Path, tally: Tally
) -> None:
    draw = random.Random(f"complete {place}")
    moments = [(number, after) for number in range(1, visits[place] + 1) for after in (False, True)]
    for number, after in draw.sample(moments, min(KILLS_PER_PLACE, len(moments))):
        kill_at(place, number, after, world, undisturbed, tmp_path, tally)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(KILLS_AT_ANY_TIME))
def test_a_run_killed_at_any_time_resumes_to_the_same_bits(
    number: int, world: World, seconds: float, undisturbed: Path, tmp_path: Path, tally: Tally
) -> None:
    out = tmp_path / "run"
    process = start(world.quantize(out), tmp_path / "log")
    process.join(random.Random(number).uniform(0, seconds))
    process.kill()
    process.join(PATIENCE)
    tally.fault(kill=True)
    resume_and_judge(world, out, undisturbed, tally, f"killed at time {number}")


@pytest.mark.slow
def test_a_run_killed_again_and_again_still_ends_with_the_same_bits(
    world: World, seconds: float, undisturbed: Path, tmp_path: Path, tally: Tally
) -> None:
    out, draw = tmp_path / "run", random.Random("again")
    for _ in range(5):
        process = start(world.quantize(out, "--resume"), tmp_path / "log")
        process.join(draw.uniform(0.3, 0.9) * seconds)
        process.kill()
        process.join(PATIENCE)
        tally.fault(kill=True)
    resume_and_judge(world, out, undisturbed, tally, "killed five times")


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("unit", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_asked_to_stop_says_how_to_go_on(
    how: signal.Signals, unit: int, world: World, undisturbed: Path, tmp_path: Path, tally: Tally
) -> None:
    out, log = tmp_path / "run", tmp_path / "log"
    process = start(world.quantize(out), log)
    deadline = time.monotonic() + PATIENCE
    while not (out / "checkpoint" / f"unit-{unit:03d}.safetensors").exists():
        assert process.is_alive(), log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert process.pid is not None
    os.kill(process.pid, how)
    process.join(PATIENCE)
    tally.fault()
    shown = log.read_text()
    assert process.exitcode == 130, shown
    assert "Traceback" not in shown
    assert "--resume" in shown.splitlines()[-1]
    resume_and_judge(world, out, undisturbed, tally, f"stopped by {how.name}")


def test_a_second_process_is_refused(world: World, tmp_path: Path, tally: Tally) -> None:
    out = tmp_path / "run"
    process = start(world.quantize(out, iters=100_000), tmp_path / "log")
    try:
        deadline = time.monotonic() + PATIENCE
        while not (out / "config.json").exists():
            assert process.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.001)
        tally.fault()
        second = fimaq(*world.quantize(out, "--resume", iters=100_000))
        tally.expect_right(second.code == 2, "two processes worked on one run")
        assert f"in use by process {process.pid}" in second.err
        assert process.is_alive()
    finally:
        process.kill()
        process.join(PATIENCE)
