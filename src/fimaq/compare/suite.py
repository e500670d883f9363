"""A suite: the YAML file that says which runs to compare, and the configurations it stands for.

Everything that can be wrong with it is found here, before the first run starts.
"""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from fimaq.compare.summary import MEASURES
from fimaq.config import GROWING_METHODS, Config, read_config_file
from fimaq.errors import InputError

SECTIONS = ("title", "settings", "grid", "models", "rows", "columns", "overview")
NAMED_FIRST = ("model", "bits", "method")
MOST_CELLS = 10_000
LONGEST_NAME = 200
"""Characters in a cell's name, which names a folder; the names of files in it are short."""
WEIGHT_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")

Folders = Callable[[str | Path | None, str | None, bool], Mapping[str, Any]]
"""(data folder, task, whether it must have calibration images) -> the settings that the folder stands for."""


@dataclass(frozen=True)
class Suite:
    """What a suite file asks for. Each of `grids` stands for every combination of its values."""

    name: str
    title: str
    settings: dict[str, Any]
    grids: list[dict[str, list[Any]]]
    models: dict[str, dict[str, Any]]
    """Settings of single models, by the name the grid calls them."""
    rows: list[str]
    columns: list[str]
    overview: list[str]
    """Measures in the first table; none: accuracies."""
    quick: bool


@dataclass(frozen=True)
class Cell:
    """One run of a suite: its folder's name, its configuration, and how tables show its settings."""

    name: str
    config: Config
    labels: dict[str, str]


def shipped_suites() -> list[str]:
    """Names of the suites that come with the package."""
    found = (entry.name for entry in files("fimaq").joinpath("suites").iterdir())
    return sorted(name.removesuffix(".yaml") for name in found if name.endswith(".yaml"))


def read_suite(source: str, quick: bool = False) -> Suite:
    """The suite in a YAML file, or the one that ships under this name; with `quick`, its small form."""
    path = Path(source)
    if not path.is_file():
        if source not in shipped_suites():
            raise InputError(
                f"suite {source!r} is neither a file nor one that ships: {', '.join(shipped_suites())}"
            )
        path = Path(str(files("fimaq").joinpath("suites", f"{source}.yaml")))
    content = read_config_file(path)
    _check_keys(content, (*SECTIONS, "quick"), f"suite {source}")
    small = content.pop("quick", None)
    if quick:
        if small is None:
            raise InputError(f"suite {source} has no section 'quick': run it without --quick")
        content = _in_quick_form(content, _mapping(small, "quick"))
    return _suite(path.stem, content, quick)


def expand(
    suite: Suite,
    *,
    usual: Mapping[str, Mapping[str, Any]] | None = None,
    folders: Folders = lambda data, task, needs_train: {},
    data: Path | None = None,
    given: Mapping[str, Any] | None = None,
    weights_dir: Path | None = None,
) -> list[Cell]:
    """All cells of a suite, validated, in the order of its grid. No data is read.

    Later ones win: `usual` (by task), the folder `data` in the suite's settings, those settings, the model's own
    ones, the grid, `data`, and `given`, which must not set what the grid varies.
    """
    given = given or {}
    for key in dict.fromkeys(itertools.chain(*suite.grids)):
        if key in given:
            flag = f"--{key.replace('_', '-')}"
            raise InputError(f"{flag} cannot be given: {key} is what the suite {suite.name} varies")
    cells: list[Cell] = []
    for point in _points(suite.grids):
        label, own = _model_of(suite, point)
        settings = dict(suite.settings)
        stored = settings.pop("data", None)
        named = {**settings, **own, **point}
        task = named.get("task")
        values = {
            **(usual or {}).get(str(task), {}),
            **folders(stored if data is None else None, task, "calib" not in {**named, **given}),
            **settings,
            **point,
            **{key: value for key, value in own.items() if key == "model" or key not in point},
            **folders(data, task, "calib" not in given),
            **given,
        }
        if weights_dir is not None:
            values["weights"] = _weights_in(weights_dir, values.get("weights"), str(values["model"]), label)
        try:
            config = Config.create(**values)
        except InputError as error:
            wanted = ", ".join(f"{key} {value}" for key, value in point.items())
            raise InputError(f"suite {suite.name}, cell with {wanted}: {error}") from None
        keys = {*itertools.chain(*suite.grids), *suite.rows, *suite.columns}
        labels = {key: label if key == "model" else _shown(config, key) for key in sorted(keys)}
        cells.append(Cell(_readable_name(label, config, point), config, labels))
    cells = _distinct(cells)
    _check_layout(suite, cells)
    return cells


def _in_quick_form(content: dict[str, Any], small: dict[str, Any]) -> dict[str, Any]:
    """Settings and models are replaced key by key; what else it names as a whole."""
    _check_keys(small, SECTIONS, "quick")
    for section in ("settings", "models"):
        merged = {**_mapping(content.get(section), section), **_mapping(small.get(section), f"quick.{section}")}
        content = {**content, section: merged}
    return {**content, **{key: value for key, value in small.items() if key not in ("settings", "models")}}


def _suite(name: str, content: Mapping[str, Any], quick: bool) -> Suite:
    settings = _fields(content.get("settings"), "settings", ("data",))
    models = {
        str(model): _fields(own, f"models.{model}")
        for model, own in _mapping(content.get("models"), "models").items()
    }
    given = content.get("grid")
    parts = given if isinstance(given, list) else [given]
    grids = [
        {key: value if isinstance(value, list) else [value] for key, value in _fields(part, "grid").items()}
        for part in parts
    ]
    if sum(math.prod(map(len, grid.values())) for grid in grids) > MOST_CELLS:
        raise InputError(f"suite {name} has more than {MOST_CELLS} cells: leave values of its grid out")
    empty = [key for grid in grids for key, values in grid.items() if not values]
    if empty:
        raise InputError(f"grid.{empty[0]} of suite {name} is an empty list: give at least one value")
    if not any(grids):
        raise InputError(f"suite {name} has no 'grid': give lists of values, such as bits: [w3a3, w4a4]")
    columns = _keys_of(content.get("columns", ["model"]), "columns")
    varied = dict.fromkeys(key for grid in grids for key in grid if key not in (*columns, "seed"))
    rows = _keys_of(content.get("rows", list(varied) or ["method"]), "rows")
    both = [key for key in rows if key in columns]
    if both:
        raise InputError(f"suite {name} has {both[0]!r} in rows and in columns: name it once")
    title = str(content.get("title", name))
    overview = content.get("overview", [])
    overview = overview if isinstance(overview, list) else [overview]
    _check_keys(overview, tuple(measure.key for measure in MEASURES), "overview")
    return Suite(name, title, settings, grids, models, rows, columns, overview, quick)


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InputError(f"{where} in a suite holds 'key: value' lines, not {value!r}")
    return value


def _fields(value: Any, where: str, more: tuple[str, ...] = ()) -> dict[str, Any]:
    """A mapping whose keys are all settings."""
    result = {str(key).replace("-", "_"): item for key, item in _mapping(value, where).items()}
    _check_keys(result, (*more, *Config.model_fields), where)
    return result


def _keys_of(value: Any, where: str) -> list[str]:
    keys = [str(key).replace("-", "_") for key in (value if isinstance(value, list) else [value])]
    _check_keys(keys, tuple(Config.model_fields), where)
    if not keys:
        raise InputError(f"{where} in a suite is empty: name at least one setting, such as method")
    return keys


def _check_keys(keys: Iterable[Any], accepted: tuple[str, ...], where: str) -> None:
    unknown = [str(key) for key in keys if key not in accepted]
    if unknown:
        raise InputError(f"unknown key {unknown[0]!r} in {where}: accepted are {', '.join(accepted)}")


def _points(grids: list[dict[str, list[Any]]]) -> Iterable[dict[str, Any]]:
    for grid in grids:
        for values in itertools.product(*grid.values()):
            yield dict(zip(grid, values, strict=True))


def _model_of(suite: Suite, point: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """What the suite calls the model of a cell, and the model's own settings with its real name."""
    label = point.get("model", suite.settings.get("model"))
    if label is None:
        raise InputError(f"suite {suite.name} names no model: give grid.model, a list of model names")
    return str(label), {"model": str(label), **suite.models.get(str(label), {})}


def _weights_in(folder: Path, named: Any, model: str, label: str) -> Path:
    """The weights file of a model: the one its settings name, else one called after the model."""
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder: --weights-dir takes the one that holds the weights files")
    if named is not None:
        if not (folder / str(named)).is_file():
            raise InputError(f"{folder} holds no {named}, the weights of {label}")
        return folder / str(named)
    stems = list(dict.fromkeys((model, model.split(".")[0], label)))
    names = [stem + suffix for stem in stems for suffix in WEIGHT_SUFFIXES]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise InputError(f"{folder} holds no weights of {label}: looked for {', '.join(names)}")


def _shown(config: Config, key: str) -> str:
    """A setting as tables show it."""
    if key == "rank":
        return str(config.resolved_rank) if config.method in GROWING_METHODS else "none"
    value = getattr(config, key)
    if value is None:
        return "all" if key.endswith("_size") else "default"
    return " x ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _readable_name(label: str, config: Config, point: Mapping[str, Any]) -> str:
    """A folder name that depends on the cell alone, so that a suite can grow around finished runs."""
    others = [key for key in Config.model_fields if key in point and key not in (*NAMED_FIRST, "seed")]
    described = [f"{key.replace('_', '-')}-{_shown(config, key)}" for key in others]
    parts = [label, config.bits, config.method, *described, f"seed-{config.seed}"]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(parts)).lstrip(".-")[:LONGEST_NAME]


def _distinct(cells: list[Cell]) -> list[Cell]:
    """Each configuration once. Different ones whose names fell together are told apart by a digest."""
    kept: dict[str, Cell] = {}
    for cell in cells:
        dump = json.dumps(cell.config.model_dump(mode="json"), sort_keys=True, default=str)
        kept.setdefault(dump, cell)
    names = [cell.name for cell in kept.values()]
    return [
        cell
        if names.count(cell.name) == 1
        else Cell(f"{cell.name}-{hashlib.sha256(dump.encode()).hexdigest()[:8]}", cell.config, cell.labels)
        for dump, cell in kept.items()
    ]


def _check_layout(suite: Suite, cells: list[Cell]) -> None:
    """A place in the table must not mix runs that differ in more than their seed."""
    placed = (*suite.rows, *suite.columns, "seed")
    for key in dict.fromkeys(itertools.chain(*suite.grids)):
        if key not in placed and len({cell.labels[key] for cell in cells}) > 1:
            raise InputError(f"suite {suite.name} varies {key!r}: name it in rows or in columns")
