"""fimaq compare --at-once and --ray: the tables of one cell after the other, by real processes and a real Ray."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from command_line import ARGUMENTS, CLASSES, ENVIRONMENT, MODEL, World, assert_refused, assert_same_model, fimaq

from fimaq.compare import ray_tasks

in_both_ways = pytest.mark.parametrize("flags", [("--at-once", "2"), ("--ray",)], ids=["processes", "Ray"])
looks_into_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="there is no /proc to look into")
VARYING = ("seconds", "memory")
PATIENCE = 240.0


def skip_without_ray(flags: Sequence[str]) -> None:
    if "--ray" in flags:
        pytest.importorskip("ray", reason="Ray is not installed: pip install 'fimaq[ray]'")


@pytest.fixture
def needs_ray() -> None:
    skip_without_ray(["--ray"])


def write_suite(folder: Path, world: World, grid: str, iters: int = 3, **weights: Path) -> Path:
    own = {"model": MODEL, "model_args": ARGUMENTS, "num_classes": CLASSES}
    every = {"tiny": world.weights, **weights}
    models = {name: {**own, "weights": str(path)} for name, path in every.items()}
    path = folder / "suite.yaml"
    settings = f"{{iters: {iters}, calib_size: 8, batch_size: 4, device: auto}}"
    path.write_text(f"settings: {settings}\nmodels: {json.dumps(models)}\ngrid: {grid}\n")
    return path


def table(out: Path) -> list[dict[str, str]]:
    """table.csv without what differs from run to run."""
    with open(out / "table.csv", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    return [{k: v for k, v in line.items() if k.removesuffix("_spread") not in VARYING} for line in lines]


def side_by_side(suite: Path, world: World, out: Path, *flags: str) -> list[Any]:
    return [sys.executable, "-m", "fimaq", "compare", suite, "--data", world.data, "--out", out, *flags]


def cells(out: Path) -> dict[str, Any]:
    found = json.loads((out / "compare.json").read_text())["cells"]
    return {cell["name"]: {k: v for k, v in cell["measures"].items() if k not in VARYING} for cell in found}


@in_both_ways
def test_tables_are_those_of_one_after_the_other_and_a_failing_cell_is_named(
    flags: tuple[str, ...], world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without_ray(flags)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"no weights")
    suite = write_suite(tmp_path, world, "{model: [bad, tiny], method: [fima-q]}", bad=bad)
    alone, spread = tmp_path / "alone", tmp_path / "spread"
    assert fimaq("compare", suite, "--data", world.data, "--out", alone).code == 1
    outcome = fimaq("compare", suite, "--data", world.data, "--out", spread, *flags, "--json")
    assert outcome.code == 1, outcome.err
    assert outcome.err.count("cell 1 of 2 failed and is tried again") == ("--ray" in flags)
    assert "fimaq: 1 of 2 cells failed, such as bad-w4a4-fima-q-seed-0" in outcome.err
    assert [cell["state"] for cell in json.loads(outcome.out)["cells"]] == ["failed", "done"]
    assert table(spread) == table(alone)
    assert cells(spread) == cells(alone)
    assert_same_model(*(out / "runs" / "tiny-w4a4-fima-q-seed-0" for out in (alone, spread)))
    assert "bad.safetensors" in (spread / "table.md").read_text()


@pytest.mark.usefixtures("needs_ray")
def test_what_is_finished_needs_no_ray(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = write_suite(tmp_path, world, "{model: [tiny], method: [rtn]}")
    assert fimaq("compare", suite, "--data", world.data, "--out", tmp_path / "out").code == 0
    monkeypatch.setattr(ray_tasks, "_connected", lambda use: pytest.fail("Ray was started"))
    outcome = fimaq("compare", suite, "--data", world.data, "--out", tmp_path / "out", "--ray")
    assert outcome.code == 0, outcome.err
    assert "1 finished already" in outcome.err


@pytest.mark.slow
@in_both_ways
def test_an_interrupt_keeps_finished_cells_and_the_driver_goes_on(
    flags: tuple[str, ...], world: World, tmp_path: Path
) -> None:
    skip_without_ray(flags)
    suite = write_suite(tmp_path, world, "{model: [tiny], method: [rtn, qdrop]}", iters=600)
    out = tmp_path / "out"
    command = side_by_side(suite, world, out, *flags)
    quick, long = (out / "runs" / f"tiny-w4a4-{method}-seed-0" for method in ("rtn", "qdrop"))
    driver = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: bool(list(long.glob("checkpoint/unit-000*"))), driver)
    wait_for(lambda: '"state": "done"' in (out / "compare.json").read_text(), driver)
    driver.send_signal(signal.SIGINT)
    _, errors = driver.communicate(timeout=PATIENCE)
    assert driver.returncode == 130, errors
    assert "Traceback" not in errors
    assert not (long / "model.safetensors").exists()
    before = (quick / "model.safetensors").stat().st_mtime_ns
    again = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert again.returncode == 0, again.stderr
    assert "2 cells, 1 finished already" in again.stderr
    assert (quick / "model.safetensors").stat().st_mtime_ns == before
    alone = tmp_path / "alone"
    assert fimaq("compare", suite, "--data", world.data, "--out", alone).code == 0
    assert table(out) == table(alone)
    assert_same_model(long, alone / "runs" / long.name)


def test_a_missing_package_is_named_before_anything_runs(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_tasks.importlib.util, "find_spec", lambda name: None)
    suite = write_suite(tmp_path, world, "{model: [tiny], method: [rtn]}")
    outcome = fimaq("compare", suite, "--data", world.data, "--out", tmp_path / "out", "--ray")
    assert_refused(outcome, "pip install 'fimaq[ray]'")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("needs_ray")
def test_an_address_where_nobody_listens_is_refused(world: World, tmp_path: Path) -> None:
    suite = write_suite(tmp_path, world, "{model: [tiny], method: [rtn]}")
    outcome = fimaq(
        *("compare", suite, "--data", world.data, "--out", tmp_path / "out", "--ray-address", "127.0.0.1:9")
    )
    assert_refused(outcome, "127.0.0.1:9")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@looks_into_proc
def test_a_cell_whose_process_is_killed_fails_and_the_others_go_on(world: World, tmp_path: Path) -> None:
    suite = write_suite(tmp_path, world, "{model: [tiny], method: [qdrop, rtn]}", iters=100_000)
    out = tmp_path / "out"
    long = out / "runs" / "tiny-w4a4-qdrop-seed-0"
    command = side_by_side(suite, world, out, "--at-once", "2")
    driver = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: (long / "events.jsonl").exists(), driver)
    (number,) = [p for p in children_of(driver.pid) if _has_open(p, long)]
    os.kill(number, signal.SIGKILL)
    _, errors = driver.communicate(timeout=PATIENCE)
    assert driver.returncode == 1, errors
    assert "its process ended with exit code -9" in errors
    assert [cell["state"] for cell in json.loads((out / "compare.json").read_text())["cells"]] == [
        "failed",
        "done",
    ]


@looks_into_proc
def test_cells_end_with_the_command_that_started_them(world: World, tmp_path: Path) -> None:
    suite = write_suite(tmp_path, world, "{model: [tiny], method: [qdrop, brecq]}", iters=100_000)
    out = tmp_path / "out"
    command = side_by_side(suite, world, out, "--at-once", "2")
    driver = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    wait_for(lambda: len(list(out.glob("runs/*/events.jsonl"))) == 2, driver)
    cells = [p for p in children_of(driver.pid) if any(_has_open(p, path) for path in out.glob("runs/*"))]
    assert len(cells) == 2
    driver.kill()
    driver.wait()
    wait_for(lambda: not any(_lives(number) for number in cells))


@pytest.mark.parametrize("flags", [("--at-once", "2", "--ray"), ("--per-gpu", "2"), ("--cpus-per-cell", "2")])
def test_what_is_with_ray_or_without_it_is_refused_otherwise(
    flags: tuple[str, ...], world: World, tmp_path: Path
) -> None:
    suite = write_suite(tmp_path, world, "{model: [tiny], method: [rtn]}")
    outcome = fimaq("compare", suite, "--data", world.data, "--out", tmp_path / "out", *flags)
    assert_refused(outcome, " ".join(flags[:2]), "Ray")


def wait_for(happened: Callable[[], bool], driver: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline
        assert driver is None or driver.poll() is None
        time.sleep(0.1)


def children_of(number: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{number}/task/{number}/children").read_text().split()]


def _has_open(number: int, folder: Path) -> bool:
    """Whether a process has a file below `folder` open: a run directory is locked by who works in it."""
    for link in Path(f"/proc/{number}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            if str(folder) in os.readlink(link):
                return True
    return False


def _lives(number: int) -> bool:
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # ended, and nobody has asked for its exit code
