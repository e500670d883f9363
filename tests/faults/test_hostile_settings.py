"""YAML from strangers: configurations and suites are refused in one line, and write nothing anywhere."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_line import MODEL, World, fimaq
from hostile import PLAIN, TEXTS, VALUES, bounds, inputs, names_below, spoiled
from hypothesis import example, given
from hypothesis import strategies as st
from tally import Tally

from fimaq.compare.suite import SECTIONS, expand, read_suite
from fimaq.config import Config
from fimaq.errors import InputError

EXECUTES = "model_args: !!python/object/apply:pathlib.Path.touch [executed]\n"
GROWS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [*{old}, *{old}, *{old}, *{old}, *{old}, *{old}, *{old}, *{old}, *{old}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
BOMBS = (
    EXECUTES,
    GROWS + "bits: *i\n",
    "bits: &b [*b]\n",
    "iters: " + "[" * 3000,
    "memory_budget: " + "9" * 400 + "GiB\n",
    "seed: 2020-13-45\n",
    "seed: 0x_\n",
    "iters: 1" + "0" * 400 + "\n",
    "? [a, b]\n: c\n",
    "weights: \"a\\0b\"\n",
    "data: [1]\n",
    "\xff\xfe",
)  # fmt: skip
CONFIGS = st.dictionaries(st.sampled_from(sorted(Config.model_fields)) | TEXTS, VALUES, max_size=5).map(
    lambda values: yaml.safe_dump(values)
)
GOOD_SUITE = "grid: {model: [a, b], bits: [w3a3, w4a4], seed: [0, 1]}\nmodels: {a: {model: x}}\nrows: [bits]\n"
SUITES = st.fixed_dictionaries(
    {
        "grid": st.dictionaries(
            st.sampled_from(sorted(Config.model_fields)), st.lists(PLAIN, max_size=3), max_size=3
        )
    },
    optional={section: VALUES for section in (*SECTIONS, "quick") if section != "grid"},
).map(yaml.safe_dump)


def write(folder: Path, text: str) -> Path:
    path = folder / "given.yaml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    return path


@inputs(30)
@given(text=CONFIGS | st.text(max_size=60) | spoiled(b"bits: w4a4\niters: 20\nmodel-args: {depth: 2}\n").map(
    lambda content: content.decode("latin-1")
))  # fmt: skip
def test_a_configuration_is_used_or_refused_in_one_line(
    text: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    try_configuration(text, tmp_path_factory.mktemp("hostile"), monkeypatch, tally)


@pytest.mark.parametrize("number", range(len(BOMBS)))
def test_a_configuration_made_to_harm_is_refused(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    try_configuration(BOMBS[number], tmp_path, monkeypatch, tally)


def try_configuration(text: str, folder: Path, patch: pytest.MonkeyPatch, tally: Tally) -> None:
    """No such model exists, so that nothing is computed where the configuration itself is good."""
    path = write(folder, text)
    patch.chdir(folder)
    tally.input()
    with bounds():
        outcome = fimaq("quantize", "no_such_model", "--config", path, "--out", folder / "run")
    assert outcome.code == 2, outcome.err
    assert outcome.err.splitlines()[-1].startswith("fimaq:") or "Usage" in outcome.err
    assert names_below(folder) == {"given.yaml"}


@inputs(30)
@given(text=SUITES | spoiled(GOOD_SUITE.encode()).map(lambda content: content.decode("latin-1")))
@example(text=GOOD_SUITE)
@example(text="grid: {model: ['../../outside', '/etc', '..', '.', '', 'a/b']}\n")
@example(text="grid: {model: ['" + "x" * 300 + "']}\n")
@example(
    text="grid:\n" + "".join(f"  {key}: {list(range(1, 90))}\n" for key in ("iters", "rank", "batch_size", "seed"))
)
@example(text="grid: {model: [a], weights: ['../x', '../../y']}\nrows: [weights]\n")
def test_a_suite_is_used_or_refused_and_its_cells_stay_in_their_folder(
    text: str, tmp_path_factory: pytest.TempPathFactory, tally: Tally
) -> None:
    folder = tmp_path_factory.mktemp("hostile")
    path, runs = write(folder, text), folder / "out" / "runs"
    tally.input()
    with bounds():
        try:
            cells = expand(read_suite(str(path)))
        except InputError:
            cells = []
        for cell in cells:
            tally.expect_right((runs / cell.name).resolve().parent == runs.resolve(), f"cell {cell.name!r}")
            assert len(cell.name.encode()) <= 255
        outcome = fimaq("compare", path, "--out", folder / "out", "--calib", folder)
    assert outcome.code in (1, 2), outcome
    assert "Traceback" not in outcome.err
    assert names_below(folder) == {"given.yaml"}


@pytest.mark.parametrize("name", ["..", "a/../../b", "/tmp/x", "-rf", ""])
def test_names_of_class_folders_and_runs_are_only_names(
    name: str, world: World, undisturbed: Path, tmp_path: Path, tally: Tally
) -> None:
    """A class map may say what it likes: nothing is read or written under the names in it."""
    class_map = tmp_path / "map.json"
    class_map.write_text(json.dumps({name: 0, "0": 0, "1": 1, "2": 2, "3": 3}))
    before = names_below(tmp_path.parent)
    tally.input()
    line: list[Any] = ["quantize", "no_such_model", "--data", world.data, "--class-map", class_map]
    outcome = fimaq(*line, "--out", tmp_path / "run")
    assert outcome.code == 2
    assert MODEL not in outcome.out
    assert names_below(tmp_path.parent) == before
