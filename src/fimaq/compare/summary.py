"""What the runs of a suite measured: one number for each measure, averaged over seeds."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fimaq.errors import InputError

GIGABYTE = 1e9


@dataclass(frozen=True)
class Measure:
    """One thing that tables show. `better`: +1 where more is better, -1 where less is, 0 for neither."""

    key: str
    heading: str
    digits: int
    better: int


MEASURES = (
    Measure("top1", "top-1 %", 2, +1),
    Measure("top1_full", "full precision", 2, 0),
    Measure("top1_drop", "drop", 2, -1),
    Measure("ap_box", "AP box", 1, +1),
    Measure("ap_box_full", "full precision, box", 1, 0),
    Measure("ap_box_drop", "drop, box", 1, -1),
    Measure("ap_mask", "AP mask", 1, +1),
    Measure("ap_mask_full", "full precision, mask", 1, 0),
    Measure("ap_mask_drop", "drop, mask", 1, -1),
    Measure("kl", "KL", 4, -1),
    Measure("seconds", "seconds", 1, -1),
    Measure("memory", "memory, GB", 2, -1),
)
ACCURACIES = {"top1": ("top1",), "ap_box": ("bbox", "AP"), "ap_mask": ("segm", "AP")}
"""Where metrics.json keeps each kind of accuracy, below the model's name."""


@dataclass(frozen=True)
class CellResult:
    """What is known about one cell. `measures` is empty until it is done; `error` is set where it failed.

    Beside those of MEASURES it may have `images`: how many its accuracy is of.
    """

    name: str
    labels: dict[str, str]
    measures: dict[str, float] = field(default_factory=dict)
    error: str | None = None

    @property
    def state(self) -> str:
        if self.error is not None:
            return "failed"
        return "done" if self.measures else "waiting"


@dataclass(frozen=True)
class Average:
    """Mean over seeds, and the sample standard deviation where there is more than one."""

    mean: float
    spread: float | None


@dataclass(frozen=True)
class Entry:
    """One place of the table: the cells that differ in nothing but their seed."""

    row: tuple[str, ...]
    column: tuple[str, ...]
    averages: dict[str, Average]
    done: int
    total: int
    errors: tuple[str, ...]


def measures_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The measures in a run's metrics.json, by the keys of MEASURES.

    KL is that on validation images; without any, and for detectors, that on calibration images.
    """
    try:
        return _measures(metrics)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InputError(f"the metrics are damaged: {type(error).__name__} {error}") from None


def _measures(metrics: Mapping[str, Any]) -> dict[str, float]:
    accuracy = metrics.get("accuracy") or {}
    found: dict[str, float] = {}
    for key, path in ACCURACIES.items():
        quantized, full = (_number(accuracy.get(model), path) for model in ("quantized", "full_precision"))
        if quantized is not None:
            found[key] = quantized
        if full is not None:
            found[f"{key}_full"] = full
        if quantized is not None and full is not None:
            found[f"{key}_drop"] = full - quantized
    images = _number(accuracy, ("images",))
    if images is not None:
        found["images"] = images
    divergences = (_number(part, ("kl_divergence",)) for part in (accuracy, metrics.get("fidelity")))
    divergence = next((value for value in divergences if value is not None), None)
    if divergence is not None:
        found["kl"] = divergence
    # A resumed run counts its own seconds only; the finished units it found remember theirs.
    units = sum(unit.get("seconds", 0.0) for unit in metrics.get("units", []))
    found["seconds"] = max(float(metrics.get("seconds", 0.0)), units)
    if "peak_memory_bytes" in metrics:
        found["memory"] = metrics["peak_memory_bytes"] / GIGABYTE
    return found


def summarise(results: Sequence[CellResult], rows: Sequence[str], columns: Sequence[str]) -> list[Entry]:
    """The places of the table in the order of the cells, each with averages over the cells that are done."""
    places: dict[tuple[tuple[str, ...], tuple[str, ...]], list[CellResult]] = {}
    for result in results:
        row, column = (tuple(result.labels[key] for key in keys) for keys in (rows, columns))
        places.setdefault((row, column), []).append(result)
    return [_entry(row, column, found) for (row, column), found in places.items()]


def best_of(entries: Sequence[Entry]) -> set[tuple[tuple[str, ...], tuple[str, ...], str]]:
    """(row, column, measure) of the best values.

    They are sought in each column among the rows that differ in their last key only, so that methods compete
    at the same bits. Equal values, as shown, are all best; a value without competitor is not.
    """
    best = set()
    for measure in (measure for measure in MEASURES if measure.better):
        contests: dict[tuple[tuple[str, ...], tuple[str, ...]], list[tuple[float, Entry]]] = {}
        for entry in entries:
            if measure.key in entry.averages:
                value = measure.better * round(entry.averages[measure.key].mean, measure.digits)
                contests.setdefault((entry.row[:-1], entry.column), []).append((value, entry))
        for contest in contests.values():
            top = max(value for value, _ in contest)
            if len(contest) > 1:
                best |= {(entry.row, entry.column, measure.key) for value, entry in contest if value == top}
    return best


def _entry(row: tuple[str, ...], column: tuple[str, ...], found: Sequence[CellResult]) -> Entry:
    averages = {}
    for measure in MEASURES:
        values = [result.measures[measure.key] for result in found if measure.key in result.measures]
        if values:
            spread = statistics.stdev(values) if len(values) > 1 else None
            averages[measure.key] = Average(statistics.fmean(values), spread)
    done = sum(result.state == "done" for result in found)
    errors = tuple(f"{result.name}: {result.error}" for result in found if result.error is not None)
    return Entry(row, column, averages, done, len(found), errors)


def _number(value: Any, path: Sequence[str]) -> float | None:
    """What lies at `path` in nested mappings; None where it is missing or null."""
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return None if value is None else float(value)
