"""`fimaq fisher`: the files it makes, what its figures mean, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import ARGUMENTS, CLASSES, MODEL, World, assert_refused, fimaq
from PIL import Image

from fimaq.artifact.files import read_tensors
from fimaq.config import Config
from fimaq.fisher.collect import Sample
from fimaq.fisher.exact import relative_error
from fimaq.report.fisher_figure import FILES, _approximations

CHANNELS, RANK = ARGUMENTS["embed_dim"], 3
NAMES = ("diagonal", "low rank", "DPLR")


def command(world: World, out: Path, *more: str | Path, **changed: Any) -> list[str | Path]:
    options: dict[str, Any] = {
        "unit": "blocks.0",
        "weights": world.weights,
        "data": world.data,
        "num_classes": CLASSES,
        "calib_size": 8,
        "exact_size": 4,
        "rank": RANK,
        "device": "cpu",
        "out": out,
        **changed,
    }
    line: list[str | Path] = ["fisher", MODEL]
    for name, value in options.items():
        if value is not None:
            line += [f"--{name.replace('_', '-')}", str(value)]
    for name, number in ARGUMENTS.items():
        line += ["--model-arg", f"{name}={number}"]
    return [*line, *more]


@pytest.fixture(scope="module", params=["signed", "absolute"])
def drawn(request: pytest.FixtureRequest, world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pictures") / "new" / request.param
    outcome = fimaq(*command(world, out, averages=request.param))
    assert outcome.code == 0, outcome.err
    assert all(name in outcome.out for name in NAMES)
    return out


def test_it_makes_its_files_and_no_others(drawn: Path) -> None:
    assert sorted(path.name for path in drawn.iterdir()) == sorted(FILES)
    for name in ("fisher.png", "rank.png"):
        with Image.open(drawn / name) as picture:
            picture.load()
            assert picture.format == "PNG"


def test_the_figures_are_those_of_the_matrices(drawn: Path) -> None:
    figures = json.loads((drawn / "fisher.json").read_text())
    tensors, _ = read_tensors(drawn / "fisher.safetensors")
    complete = tensors["complete"]
    assert all(t.shape == (CHANNELS, CHANNELS) and t.dtype == torch.float64 for t in tensors.values())
    for name in NAMES:
        matrix = tensors[name.replace(" ", "_")]
        error = figures["errors"][name]
        assert error == pytest.approx(float((complete - matrix).norm() / complete.norm()), abs=1e-9)
        assert 0 <= error <= 1
        assert figures["errors_by_rank"][name][-1] == error
        to_magnitudes = relative_error(complete.abs(), matrix)
        # A matrix that shares nothing with the complete one is stored at scale zero.
        assert error == 1 or figures["errors_to_magnitudes"][name] == pytest.approx(to_magnitudes, abs=1e-9)
        assert torch.equal(matrix, matrix.T)
    assert torch.equal(tensors["diagonal"], tensors["diagonal"].diagonal().diag())
    assert torch.linalg.matrix_rank(tensors["low_rank"], rtol=1e-9) <= 2 * RANK
    assert figures["errors_by_rank"]["rank"] == [1, 2, 3]


def test_no_approximation_beats_the_best_possible(drawn: Path) -> None:
    figures = json.loads((drawn / "fisher.json").read_text())
    assert figures["errors"]["diagonal"] >= figures["best_possible"]["diagonal"] - 1e-9
    assert figures["error_of_identity"] >= figures["best_possible"]["diagonal"] - 1e-9
    best = figures["best_possible"]["low rank"]
    assert best == sorted(best, reverse=True)
    if figures["averages"] == "absolute":  # symmetric of itself, so of no larger rank than k
        assert all(e >= b - 1e-9 for e, b in zip(figures["errors_by_rank"]["low rank"], best, strict=True))


def test_settings_and_sizes_are_recorded(drawn: Path) -> None:
    figures = json.loads((drawn / "fisher.json").read_text())
    expected = {"unit": "blocks.0", "token": 0, "tokens": 5, "channels": CHANNELS, "rank": RANK, "bits": "w4a4"}
    expected |= {"exact_images": 4, "calibration_images": 8, "temperature": 20.0, "averages": drawn.name}
    assert {name: figures[name] for name in expected} == expected


def test_json_token_and_channels(world: World, tmp_path: Path) -> None:
    outcome = fimaq(*command(world, tmp_path, "--json", "--linear", token=4, channels=7, rank=1))
    assert outcome.code == 0, outcome.err
    result = json.loads(outcome.out)
    assert (result["token"], result["channels"], result["out"]) == (4, 7, str(tmp_path))
    assert read_tensors(tmp_path / "fisher.safetensors")[0]["complete"].shape == (7, 7)


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "unknown unit": ({"unit": "blocks.9"}, ["blocks.9", "patch_embed", "blocks.0", "blocks.1"]),
    "the head": ({"unit": "head"}, ["head", "blocks.1"]),
    "token too large": ({"token": 5}, ["token 5", "0 to 4"]),
    "negative token": ({"token": -1}, ["token -1", "0 to 4"]),
    "too many channels": ({"channels": 25}, ["channels 25", "24"]),
    "no channels": ({"channels": 0}, ["channels 0"]),
    "more ranks than images": ({"rank": 9}, ["rank 9", "8"]),
    "no images": ({"data": None}, ["--data", "--calib"]),
    "no temperature": ({"temperature": 0}, ["temperature"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_and_nothing_written(name: str, world: World, tmp_path: Path) -> None:
    changed, named = REFUSED[name]
    assert_refused(fimaq(*command(world, tmp_path / "out", **changed)), *named)
    assert not (tmp_path / "out").exists()


def test_a_file_in_place_of_the_folder_is_refused(world: World, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    assert_refused(fimaq(*command(world, tmp_path / "out")), "out", "is a file")
    assert (tmp_path / "out").read_text() == "mine"


@pytest.mark.parametrize("kind", ["any", "diagonal"])
def test_a_matrix_that_maps_the_perturbations_is_found_again(kind: str) -> None:
    factor = torch.randn(6, 6)
    fisher = factor @ factor.T if kind == "any" else factor.diagonal().square().diag()
    deltas = torch.randn(12, 6)
    collected = {i: (deltas[i : i + 1] @ fisher, deltas[i : i + 1]) for i in range(12)}
    samples = [Sample(i, [], [], torch.empty(0)) for i in range(12)]
    config = Config.create(averages="signed", rank=6, calib_size=12, batch_size=4)
    found = _approximations(samples, collected, 6, config, slice(3, 6))
    block = fisher[3:, 3:].double()
    assert relative_error(block, found["low rank"]) < 1e-3
    assert (relative_error(block, found["diagonal"]) < 1e-3) == (kind == "diagonal")
