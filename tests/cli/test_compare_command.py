"""fimaq compare: a grid of runs, its tables, and what happens when it is run again or something fails."""

import csv
import json
import os
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest
from command_line import ARGUMENTS, CLASSES, MODEL, World, assert_refused, assert_same_model, fimaq
from runs import snapshot, stop_at_unit

from fimaq.artifact.files import FileLock

QUICK = "{iters: 3, calib_size: 8, batch_size: 4, device: cpu}"
TABLES = ("table.md", "table.csv", "table.html", "compare.json")
FILES = {"table.md", "table.csv", "table.html", "compare.json", "runs"}


def write_suite(
    folder: Path, world: World, grid: str, weights: dict[str, Path] | None = None, more: str = ""
) -> Path:
    """A suite over the tiny ViT, under the name `tiny` and any others with weights of their own."""
    own = {"model": MODEL, "model_args": ARGUMENTS, "num_classes": CLASSES}
    every = {"tiny": world.weights, **(weights or {})}
    models = {name: {**own, "weights": str(path)} for name, path in every.items()}
    path = folder / "suite.yaml"
    path.write_text(f"settings: {QUICK}\nmodels: {json.dumps(models)}\ngrid: {grid}\n{more}")
    return path


def compare(suite: Path, world: World, out: Path, *more: str) -> Any:
    return fimaq("compare", suite, "--data", world.data, "--out", out, *more)


@pytest.fixture(scope="module")
def compared(world: World, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    """Two widths, two methods, two seeds, done: the suite, the folder, and what --json said."""
    folder = tmp_path_factory.mktemp("compared")
    suite = write_suite(folder, world, "{model: [tiny], bits: [w3a3, w6a6], method: [rtn, fima-q], seed: [0, 1]}")
    outcome = compare(suite, world, folder / "out", "--json")
    assert outcome.code == 0, outcome.err
    assert "cell 8 of 8: tiny-w6a6-fima-q-seed-1" in outcome.err
    assert "cell 8/8, unit 1/" in outcome.err
    return suite, folder / "out", json.loads(outcome.out)


def metrics_of(out: Path, name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((out / "runs" / name / "metrics.json").read_text())
    return result


def test_tables_hold_means_and_spreads_over_seeds(compared: tuple[Path, Path, dict[str, Any]]) -> None:
    _, out, report = compared
    assert {path.name for path in out.iterdir()} == FILES
    assert [cell["state"] for cell in report["cells"]] == ["done"] * 8
    with open(out / "table.csv", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert [(line["bits"], line["method"]) for line in lines] == [
        *(("w3a3", "rtn"), ("w3a3", "fima-q"), ("w6a6", "rtn"), ("w6a6", "fima-q"))
    ]
    for line in lines:
        runs = [metrics_of(out, f"tiny-{line['bits']}-{line['method']}-seed-{seed}") for seed in (0, 1)]
        for key, values in (
            ("top1", [run["accuracy"]["quantized"]["top1"] for run in runs]),
            ("top1_full", [run["accuracy"]["full_precision"]["top1"] for run in runs]),
            ("kl", [run["accuracy"]["kl_divergence"] for run in runs]),
        ):
            assert float(line[key]) == pytest.approx(statistics.mean(values))
            assert float(line[f"{key}_spread"]) == pytest.approx(statistics.stdev(values))
        assert float(line["top1_drop"]) == pytest.approx(float(line["top1_full"]) - float(line["top1"]))
        assert float(line["memory"]) > 0.01
        shown = f"{float(line['top1']):.2f} ± {float(line['top1_spread']):.2f}"
        assert shown in (out / "table.md").read_text()
        assert shown in (out / "table.html").read_text()


def test_a_cell_is_the_run_that_quantize_makes(
    compared: tuple[Path, Path, dict[str, Any]], world: World, tmp_path: Path
) -> None:
    outcome = fimaq(*world.quantize(tmp_path / "alone", bits="w3a3", method="fima-q", seed=1))
    assert outcome.code == 0, outcome.err
    assert_same_model(tmp_path / "alone", compared[1] / "runs" / "tiny-w3a3-fima-q-seed-1")


def test_running_again_runs_nothing(compared: tuple[Path, Path, dict[str, Any]], world: World) -> None:
    suite, out, report = compared
    before = snapshot(out)
    outcome = compare(suite, world, out, "--json")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out) == report
    assert "8 finished already" in outcome.err
    assert "unit" not in outcome.err
    assert snapshot(out) == before


def test_a_cell_evaluated_otherwise_since_is_evaluated_again(
    compared: tuple[Path, Path, dict[str, Any]], world: World, tmp_path: Path
) -> None:
    suite, made, report = compared
    out = shutil.copytree(made, tmp_path / "out")
    cell = out / "runs" / "tiny-w3a3-rtn-seed-0"
    assert fimaq("evaluate", cell, "--data", world.data, "--val-size", "4", "--device", "cpu").code == 0
    outcome = compare(suite, world, out, "--json")
    assert outcome.code == 0, outcome.err
    assert "7 finished already" in outcome.err
    again, before = (found["cells"][0]["measures"] for found in (json.loads(outcome.out), report))
    assert {key: again[key] for key in ("top1", "kl")} == {key: before[key] for key in ("top1", "kl")}


def test_a_folder_in_use_or_no_folder_is_refused(world: World, tmp_path: Path) -> None:
    suite = write_suite(tmp_path, world, "{model: [tiny], method: [rtn]}")
    out = tmp_path / "out"
    out.mkdir()
    lock = FileLock(out / ".lock", "a test")
    lock.sign()
    assert_refused(compare(suite, world, out), f"comparison {out} is in use by process {os.getpid()}")
    lock.release()
    assert_refused(compare(suite, world, suite), f"{suite} cannot be used for --out: Not a directory")


def test_the_summary_is_the_table(compared: tuple[Path, Path, dict[str, Any]], world: World) -> None:
    suite, out, _ = compared
    outcome = compare(suite, world, out)
    lines = (out / "table.md").read_text().splitlines()
    assert [line for line in lines if line.startswith("|")] == outcome.out.splitlines()[:6]
    assert "8 of 8 runs done" in outcome.out


def test_a_folder_with_runs_of_other_settings_is_refused_and_kept(
    compared: tuple[Path, Path, dict[str, Any]], world: World
) -> None:
    suite, out, _ = compared
    kept = {name: (out / name).read_bytes() for name in TABLES}
    outcome = compare(suite, world, out, "--iters", "4")
    assert_refused(outcome, "has iters 3, and 4 was asked for; give another --out")
    assert kept == {name: (out / name).read_bytes() for name in TABLES}


def test_a_failing_cell_does_not_stop_the_others(world: World, tmp_path: Path) -> None:
    (tmp_path / "bad.safetensors").write_bytes(b"no weights")
    suite = write_suite(
        tmp_path,
        world,
        "{model: [bad, tiny], method: [rtn]}",
        weights={"bad": tmp_path / "bad.safetensors"},
    )
    outcome = compare(suite, world, tmp_path / "out", "--json")
    assert outcome.code == 1
    assert outcome.err.splitlines()[-1].startswith("fimaq: 1 of 2 cells failed, such as bad-w4a4-rtn-seed-0")
    bad, tiny = json.loads(outcome.out)["cells"]
    assert (bad["state"], tiny["state"]) == ("failed", "done")
    assert "bad.safetensors" in bad["error"]
    for name in TABLES:
        assert "bad.safetensors" in (tmp_path / "out" / name).read_text(), name
    (tmp_path / "bad.safetensors").write_bytes(world.weights.read_bytes())
    assert compare(suite, world, tmp_path / "out").code == 0


def test_an_interrupted_comparison_goes_on_with_the_unit_it_was_at(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = write_suite(tmp_path, world, "{model: [tiny], method: [qdrop], seed: [0, 1]}")
    with monkeypatch.context() as patch:
        stop_at_unit(2, patch)
        outcome = compare(suite, world, tmp_path / "out")
    assert outcome.code == 130
    assert "run the command again\n" in outcome.err
    assert "0 of 2 runs done, 2 waiting" in (tmp_path / "out" / "table.md").read_text()
    outcome = compare(suite, world, tmp_path / "out")
    assert outcome.code == 0, outcome.err
    assert outcome.err.count("taken from the checkpoint") == 2


@pytest.mark.parametrize(
    ("grid", "flags", "named"),
    [
        ("{model: [tiny], bit: [w3a3]}", [], ["'bit'", "bits"]),
        ("{model: [tiny], bits: [w3a3, w1a1]}", [], ["w1a1", "from 2 to 8"]),
        ("{model: [tiny, tyni]}", [], ["'tyni'"]),
        ("{model: [tiny]}", ["--quick"], ["'quick'"]),
        ("{model: [tiny]}", ["--device", "tpu"], ["tpu"]),
        ("{model: [tiny]}", ["--data", "absent"], ["absent"]),
        ("{model: [tiny]}", ["--out", "caf\udce9"], ["caf", "not UTF-8"]),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_runs(
    world: World, tmp_path: Path, grid: str, flags: list[str], named: list[str]
) -> None:
    suite = write_suite(tmp_path, world, grid)
    assert_refused(compare(suite, world, tmp_path / "out", *flags), *named)
    assert not (tmp_path / "out").exists()


def test_calibration_images_are_needed(world: World, tmp_path: Path) -> None:
    suite = write_suite(tmp_path, world, "{model: [tiny]}")
    assert_refused(fimaq("compare", suite, "--out", tmp_path / "out"), "--data")


def test_a_run_directory_is_not_made_a_comparison(world: World, finished: Path, tmp_path: Path) -> None:
    suite = write_suite(tmp_path, world, "{model: [tiny]}")
    before = snapshot(finished)
    assert_refused(compare(suite, world, finished), "run directory")
    assert snapshot(finished) == before


def test_quick_and_full_do_not_share_a_folder(world: World, tmp_path: Path) -> None:
    more = "quick: {settings: {iters: 2}}\n"
    suite = write_suite(tmp_path, world, "{model: [tiny], method: [rtn]}", more=more)
    assert compare(suite, world, tmp_path / "out", "--quick").code == 0
    assert_refused(compare(suite, world, tmp_path / "out"), "--quick")
