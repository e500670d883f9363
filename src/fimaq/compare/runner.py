"""Running the cells of a suite, one after the other or otherwise, and keeping the tables up to date."""

import contextlib
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fimaq.artifact.files import FileLock, read_json, write_bytes, write_json
from fimaq.artifact.run_directory import CONFIG, LOCK, RunDirectory
from fimaq.compare.suite import Cell, Suite
from fimaq.compare.summary import CellResult, measures_of, summarise
from fimaq.compare.tables import csv_text, html_page, markdown
from fimaq.config import Config
from fimaq.errors import FimaqError, InputError
from fimaq.progress import Facts, Silent

REPORT = "compare.json"
RUNS = "runs"
GIVEN_FREELY = ("device", "memory_budget", "host_budget", "tensorboard", "parts")
"""Settings that a finished run need not share: where and in which order it was computed, what was shown."""

RunCell = Callable[[Config, Path, bool, Silent], dict[str, Any]]
"""(configuration, run directory, resume, progress) -> metrics: what `fimaq quantize` calls."""


@dataclass(frozen=True)
class Waiting:
    """A cell that has to be run, its place among all cells (from 1), and its run directory."""

    cell: Cell
    number: int
    of: int
    path: Path

    @property
    def title(self) -> str:
        return f"cell {self.number} of {self.of}"


Work = Callable[[Sequence[Waiting], Silent], Iterator[CellResult]]
"""Runs cells, in any order and place, and gives what became of each as soon as it is known."""


class Numbered(Silent):
    """Another progress display, told which cell the work belongs to."""

    def __init__(self, shown: Silent, prefix: str) -> None:
        self.shown, self.prefix = shown, prefix

    def note(self, text: str) -> None:
        self.shown.note(text)

    def start(self, what: str, total: int) -> None:
        self.shown.start(f"{self.prefix}, {what}", total)

    def update(self, done: int, detail: str = "") -> None:
        self.shown.update(done, detail)

    def report(self, facts: Facts) -> None:
        self.shown.report(replace(facts, within=self.prefix))


def run_suite(suite: Suite, cells: Sequence[Cell], out: Path, work: Work, progress: Silent) -> dict[str, Any]:
    """Run what is not finished in `out`, rewrite the tables after each cell, and return what compare.json holds.

    A cell that fails is recorded and the rest goes on. An interruption passes through; running again resumes.
    """
    _check_folder(out, suite)
    _check_settings(out, cells)
    try:
        (out / RUNS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{out} cannot be used for --out: {error.strerror}; give a new folder") from None
    lock = FileLock(out / LOCK, f"comparison {out}")
    try:
        lock.sign()
        return _run_cells(suite, cells, out, work, progress)
    finally:
        lock.release(remove=True)


def _run_cells(suite: Suite, cells: Sequence[Cell], out: Path, work: Work, progress: Silent) -> dict[str, Any]:
    stored = {cell.name: stored_metrics(out / RUNS / cell.name, cell.config) for cell in cells}
    results = {
        cell.name: CellResult(cell.name, cell.labels, measures_of(metrics) if metrics else {})
        for cell in cells
        for metrics in (stored[cell.name],)
    }
    finished = sum(metrics is not None for metrics in stored.values())
    progress.note(f"{suite.title}: {len(cells)} cells" + (f", {finished} finished already" if finished else ""))
    report = write_report(suite, list(results.values()), out)
    waiting = [
        Waiting(cell, number, len(cells), out / RUNS / cell.name)
        for number, cell in enumerate(cells, 1)
        if stored[cell.name] is None
    ]
    titles = {one.cell.name: one.title for one in waiting}
    for result in work(waiting, progress):
        results[result.name] = result
        if result.error is not None:
            progress.note(f"{titles[result.name]} failed: {result.error}")
        report = write_report(suite, list(results.values()), out)
    return report


def one_by_one(run: RunCell) -> Work:
    """Run each cell in this process, in the order given."""

    def work(waiting: Sequence[Waiting], progress: Silent) -> Iterator[CellResult]:
        for one in waiting:
            progress.note(f"{one.title}: {one.cell.name}")
            yield run_cell(one, run, Numbered(progress, f"cell {one.number}/{one.of}"))

    return work


def _asked(config: Config) -> dict[str, Any]:
    """What a finished run of this configuration has stored."""
    free = {*GIVEN_FREELY}
    if config.precision is None:  # left to the machine, which may not be this one
        free.add("precision")
    return {key: value for key, value in config.resolved().items() if key not in free}


def _check_settings(out: Path, cells: Sequence[Cell]) -> None:
    """Refuse a folder whose finished cells have other settings: its tables would be lost."""
    for cell in cells:
        try:
            stored = RunDirectory.open_existing(out / RUNS / cell.name).config.get("settings", {})
        except InputError:
            continue
        asked = _asked(cell.config)
        for key in sorted(stored.keys() & asked.keys()):
            if _comparable(stored[key], key) != _comparable(asked[key], key):
                raise InputError(
                    f"{out} holds cells of other settings: {cell.name} has {key} {stored[key]}, and {asked[key]} "
                    "was asked for; give another --out"
                )


def stored_metrics(path: Path, config: Config) -> dict[str, Any] | None:
    """What a finished run of exactly this configuration measured; None where there is still work to do.

    A run of other settings or paths is left to the run itself, which compares contents and says what differs.
    """
    try:
        directory = RunDirectory.open_existing(path)
        metrics = directory.read_metrics()
        measures_of(metrics)
    except InputError:
        return None
    asked = _asked(config)
    sections = directory.config
    model = sections.get("model", {})
    kept = {**sections.get("settings", {}), **sections.get("given", {})}
    kept |= {"model": model.get("name"), "model_args": model.get("args")}
    if config.num_classes is not None:
        kept["num_classes"] = model.get("num_classes")
    compared = [key for key in asked if key != "num_classes" or key in kept]
    same = all(key in kept and _comparable(kept[key], key) == _comparable(asked[key], key) for key in compared)
    # `evaluate` and `report`, which may take other images, also store how they preprocessed them.
    accuracy: Any = metrics.get("accuracy")
    evaluated = config.val is None or (bool(accuracy) and "preprocessing" not in accuracy)
    return metrics if same and evaluated else None


def write_report(suite: Suite, results: Sequence[CellResult], out: Path) -> dict[str, Any]:
    """Write compare.json and the three tables, each whole or not at all."""
    entries = summarise(results, suite.rows, suite.columns)
    report: dict[str, Any] = {
        "suite": suite.name,
        "quick": suite.quick,
        "rows": suite.rows,
        "columns": suite.columns,
        "overview": suite.overview,
        "cells": [
            {
                "name": result.name,
                "run": f"{RUNS}/{result.name}",
                "labels": result.labels,
                "state": result.state,
                "measures": result.measures,
                "error": result.error,
            }
            for result in results
        ],
        "table": [
            {
                **dict(zip(suite.rows, entry.row, strict=True)),
                **dict(zip(suite.columns, entry.column, strict=True)),
                "runs_done": entry.done,
                "runs": entry.total,
                "measures": {key: {"mean": a.mean, "spread": a.spread} for key, a in entry.averages.items()},
            }
            for entry in entries
        ],
    }
    shape = (results, suite.rows, suite.columns)
    write_bytes(out / "table.md", markdown(suite.title, *shape, suite.overview).encode(errors="backslashreplace"))
    write_bytes(out / "table.csv", csv_text(*shape).encode(errors="backslashreplace"))
    write_bytes(
        out / "table.html", html_page(suite.title, *shape, suite.overview).encode(errors="backslashreplace")
    )
    write_json(out / REPORT, report)
    return report


def run_cell(one: Waiting, run: RunCell, progress: Silent) -> CellResult:
    """What became of the cell, in this process; whatever goes wrong with it is part of the result."""
    cell = one.cell
    _forget_peak_memory()
    try:
        metrics = run(cell.config, one.path, True, progress)
        return CellResult(cell.name, cell.labels, measures_of(metrics))
    except FimaqError as error:
        return CellResult(cell.name, cell.labels, error=str(error))
    except Exception as error:  # whatever it is, the other cells are still wanted
        if os.environ.get("FIMAQ_TRACEBACK"):
            raise
        return CellResult(cell.name, cell.labels, error=f"{type(error).__name__}: {error}")


def _forget_peak_memory() -> None:
    """Each cell should report its own peak memory, not that of a larger one before it in this process."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):  # Linux: 5 resets the largest resident size
        Path("/proc/self/clear_refs").write_text("5")


def _check_folder(out: Path, suite: Suite) -> None:
    """Refuse a folder that something else lives in."""
    if (out / CONFIG).exists():
        raise InputError(f"{out} is a run directory: choose another --out for the comparison")
    if not (out / REPORT).exists():
        return
    before = read_json(out / REPORT)
    if not isinstance(before, dict) or bool(before.get("quick")) != suite.quick:
        form = "without" if suite.quick else "with"
        raise InputError(f"{out} holds a comparison made {form} --quick: choose another --out")


def _comparable(value: Any, key: str) -> Any:
    """Paths are compared as places, tuples as lists."""
    if key in ("calib", "val", "weights", "class_map") and isinstance(value, str):
        with contextlib.suppress(ValueError, OSError, RuntimeError):  # not a possible path: equal only as text
            return str(Path(value).resolve())
    if isinstance(value, list | tuple):
        return [_comparable(item, "") for item in value]
    if isinstance(value, dict):
        return {name: _comparable(item, "") for name, item in value.items()}
    return value
