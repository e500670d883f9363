"""Settings from a file: flags win, mistakes are named."""

import json
import shutil
from pathlib import Path

import pytest
from command_line import ARGUMENTS, MODEL, World, assert_refused, fimaq

from fimaq.cli.values import build_config
from fimaq.errors import InputError


def test_flags_win_over_the_configuration_file(world: World, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"data: {world.data}\nbits: w3a3\nmethod: rtn\ncalib-size: 6\nmodel_args: {ARGUMENTS}\n")
    line = ["quantize", MODEL, "--weights", world.weights, "--num-classes", "4", "--out", tmp_path / "run"]
    outcome = fimaq(*line, "--config", file, "--bits", "w6a6", "--batch-size", "4", "--device", "cpu")
    assert outcome.code == 0, outcome.err
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    settings = stored["settings"]
    assert (settings["bits"], settings["method"], settings["calib_size"]) == ("w6a6", "rtn", 6)
    assert stored["model"]["args"] == ARGUMENTS


def test_an_unknown_key_in_the_configuration_file_is_refused(world: World, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("itters: 5\n")
    assert_refused(fimaq(*world.quantize(tmp_path / "run", "--config", tmp_path / "run.yaml")), "itters")
    assert not (tmp_path / "run").exists()


def test_the_data_flag_wins_over_data_in_the_file(world: World, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("data: elsewhere\n")
    line = world.quantize(tmp_path / "run", "--config", tmp_path / "run.yaml", method="rtn")
    assert fimaq(*line).code == 0


def test_the_data_flag_wins_over_calib_in_the_file(world: World, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"calib: {world.data / 'val'}\n")
    line = world.quantize(tmp_path / "run", "--config", tmp_path / "run.yaml", method="rtn")
    assert fimaq(*line).code == 0
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert stored["given"]["calib"] == str(world.data / "train")


@pytest.mark.parametrize("in_file", [False, True])
def test_a_data_folder_needs_no_training_images_where_others_are_given(
    world: World, tmp_path: Path, in_file: bool
) -> None:
    shutil.copytree(world.data / "val", tmp_path / "data" / "val")
    (tmp_path / "run.yaml").write_text(f"data: {tmp_path / 'data'}\n" if in_file else "")
    given = {"data": None if in_file else tmp_path / "data", "calib": world.data / "train", "method": "rtn"}
    outcome = fimaq(*world.quantize(tmp_path / "run", "--config", tmp_path / "run.yaml", **given))
    assert outcome.code == 0, outcome.err
    stored = json.loads((tmp_path / "run" / "config.json").read_text())["given"]
    assert stored["calib"] == str(world.data / "train")
    assert stored["val"] == str(tmp_path / "data" / "val")


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("bits: [w4a4\nx: }", id="not YAML"),
        pytest.param("- bits\n- w4a4\n", id="a list"),
        pytest.param("bits: 4\n", id="bits of another type"),
        pytest.param("data: 5\n", id="data is a number"),
        pytest.param("data:\n", id="data is empty"),
    ],
)
def test_a_bad_configuration_file_is_refused(world: World, tmp_path: Path, content: str) -> None:
    (tmp_path / "run.yaml").write_text(content)
    outcome = fimaq(*world.quantize(tmp_path / "run", "--config", tmp_path / "run.yaml", data=None))
    assert_refused(outcome)
    assert not (tmp_path / "run").exists()


def test_a_detector_without_its_task_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="mask_rcnn_swin_t is a detector: add --task detection"):
        build_config({"model": "mask_rcnn_swin_t"}, None, tmp_path)
