"""`fimaq report`: from a finished run to one file, and what it says where something cannot be had."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from command_line import (
    ARGUMENTS,
    MODEL,
    World,
    assert_refused,
    assert_same_model,
    fimaq,
    run_to_evaluate,
    truncate,
)
from PIL import Image
from runs import snapshot


def document(path: Path) -> ElementTree.Element:
    return ElementTree.fromstring(path.read_text(encoding="utf-8").partition("\n")[2])


def said(path: Path, section: str) -> str:
    found = document(path).find(f".//section[@id='{section}']")
    assert found is not None
    return " ".join("".join(found.itertext()).split())


def report(*arguments: str | Path) -> dict[str, Any]:
    outcome = fimaq("report", *arguments, "--device", "cpu", "--images", "6", "--json")
    assert outcome.code == 0, outcome.err
    result: dict[str, Any] = json.loads(outcome.out)
    return result


@pytest.fixture(scope="module")
def evaluated(world: World, finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a report over labelled images."""
    run = shutil.copytree(finished, tmp_path_factory.mktemp("evaluated") / "run")
    result = report(run, "--data", world.data)
    assert result["report"] == str(run / "report.html")
    assert result["bytes"] == (run / "report.html").stat().st_size
    assert len(result["hurting_most"]) == 3
    return run


def test_accuracy_is_measured_shown_and_kept(evaluated: Path) -> None:
    accuracy = json.loads((evaluated / "metrics.json").read_text())["accuracy"]
    assert accuracy["images"] == 12
    right = accuracy["top1_right"]
    assert sum(right.values()) == 12
    total = right["both"] + right["only_full_precision"]
    assert accuracy["full_precision"]["top1"] == pytest.approx(100 * total / 12, abs=0.001)
    assert accuracy["kl_standard_error"] >= 0
    assert "Measured on 12 labelled images" in said(evaluated / "report.html", "accuracy")
    assert "12 images (labelled images from" in said(evaluated / "report.html", "disagreements")


def test_a_stored_accuracy_on_more_images_is_kept(world: World, finished: Path, tmp_path: Path) -> None:
    run = run_to_evaluate(finished, tmp_path)
    before = snapshot(run)
    assert report(run, "--data", world.data, "--val-size", "4")["accuracy"]["images"] == 4
    assert "Measured on 4 labelled images" in said(run / "report.html", "accuracy")
    assert snapshot(run).items() - before.items() == {("report.html", (run / "report.html").read_bytes())}


def test_an_image_that_cannot_be_read_is_left_out(world: World, finished: Path, tmp_path: Path) -> None:
    calib = shutil.copytree(world.data / "train", tmp_path / "calib")
    truncate(calib / "03.jpg")
    out = ("--out", tmp_path / "r.html", "--device", "cpu")
    outcome = fimaq("report", finished, "--calib", calib, "--images", "10", *out)
    assert outcome.code == 0, outcome.err
    assert re.search("unreadable images skipped: 1, such as .*03.jpg", outcome.err)
    assert f"9 images (images from {calib})" in said(tmp_path / "r.html", "layers")


def test_a_link_is_written_through_and_a_pipe_refused(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "page.html").touch()
    (tmp_path / "link.html").symlink_to(tmp_path / "page.html")
    report(finished, "--out", tmp_path / "link.html", "--stored")
    assert (tmp_path / "link.html").is_symlink()
    assert "blocks.0" in said(tmp_path / "page.html", "optimisation")
    os.mkfifo(tmp_path / "pipe")
    assert_refused(fimaq("report", finished, "--out", tmp_path / "pipe", "--stored"), "pipe", "regular file")


def test_units_are_measured_on_the_runs_own_validation_images(
    world: World, finished: Path, tmp_path: Path
) -> None:
    before = snapshot(finished)
    result = report(finished, "--out", tmp_path / "r.html")
    assert snapshot(finished) == before
    assert result["missing"] == ""
    text = said(tmp_path / "r.html", "layers")
    assert f"6 images (validation images from {world.data / 'val'}, which it was not fitted to)" in text
    assert "blocks.1.attn.products.0" in text
    assert "6 images (validation images" in said(tmp_path / "r.html", "disagreements")


def test_stored_measures_nothing(finished: Path, tmp_path: Path) -> None:
    report(finished, "--out", tmp_path / "r.html", "--stored")
    assert "nothing was to be measured" in said(tmp_path / "r.html", "layers")
    assert "blocks.0" in said(tmp_path / "r.html", "optimisation")


def test_people_are_told_what_hurts_and_where_the_file_is(finished: Path, tmp_path: Path) -> None:
    outcome = fimaq("report", finished, "--out", tmp_path / "r.html", "--images", "2", "--device", "cpu")
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("alone: KL") == 3
    assert f"{tmp_path / 'r.html'}: 0." in outcome.out
    assert "sensitivity of 4 units, 2 images" in outcome.err


def test_images_and_weights_that_are_gone_are_asked_for(world: World, tmp_path: Path) -> None:
    train = shutil.copytree(world.data / "train", tmp_path / "train")
    weights = Path(shutil.copy(world.weights, tmp_path / "tiny.safetensors"))
    run = tmp_path / "run"
    assert fimaq(*world.quantize(run, data=None, calib=train, weights=weights, method="rtn")).code == 0
    os.remove(weights)
    assert "give --weights FILE" in report(run)["missing"]
    assert "give --weights FILE" in said(run / "report.html", "layers")
    assert report(run, "--weights", world.weights)["missing"] == ""
    assert "6 images (calibration images from" in said(run / "report.html", "layers")
    only_train = tmp_path / "data"
    only_train.mkdir()
    train.rename(only_train / "train")
    assert "give --calib DIR or --data DIR" in report(run, "--weights", world.weights)["missing"]
    for given, called in {
        ("--data", world.data): f"validation images from {world.data / 'val'}, which it was not fitted to",
        ("--calib", world.data / "train"): f"images from {world.data / 'train'}",
        ("--data", only_train): f"calibration images from {only_train / 'train'}, which it was fitted to",
    }.items():
        assert report(run, "--weights", world.weights, *given)["missing"] == ""
        assert f"6 images ({called})" in said(run / "report.html", "layers")
    assert "rtn" in said(run / "report.html", "optimisation")


@pytest.mark.parametrize("place", [5, ["a"], {"a": 1}])
def test_a_configuration_whose_places_are_no_paths_names_no_images(
    finished: Path, place: Any, tmp_path: Path
) -> None:
    run = run_to_evaluate(finished, tmp_path)
    config = json.loads((run / "config.json").read_text())
    del config["digest"]
    config["given"] |= {"calib": place, "val": place}
    (run / "config.json").write_text(json.dumps(config))
    assert f"({place}) are not there; give --calib DIR" in report(run)["missing"]


def test_the_configuration_in_the_report_gives_the_same_bits_again(finished: Path, tmp_path: Path) -> None:
    report(finished, "--out", tmp_path / "r.html", "--stored")
    text = "".join(document(tmp_path / "r.html").find(".//pre[@id='run-yaml']").itertext())
    (tmp_path / "run.yaml").write_text(text)
    outcome = fimaq("quantize", MODEL, "--config", tmp_path / "run.yaml", "--out", tmp_path / "again")
    assert outcome.code == 0, outcome.err
    assert_same_model(finished, tmp_path / "again")
    assert str(ARGUMENTS["embed_dim"]) in text


def test_fisher_pictures_in_the_run_are_included(evaluated: Path, tmp_path: Path) -> None:
    run = run_to_evaluate(evaluated, tmp_path)
    folder = run / "fisher" / "blocks.0"
    folder.mkdir(parents=True)
    Image.new("RGB", (1600, 300), (0, 90, 160)).save(folder / "fisher.png")
    (folder / "rank.png").write_bytes(b"not a picture")
    (folder / "fisher.json").write_text('{"unit": "blocks.0", "token": 3}')
    report(run, "--stored")
    root = document(run / "report.html")
    pictures = root.findall(".//section[@id='optimisation']//img")
    assert [(p.get("alt"), p.get("width")) for p in pictures] == [
        ("Fisher matrix of one token: blocks.0, token 3", "1400")
    ]
    assert "rank.png is not shown" in said(run / "report.html", "optimisation")
    assert_refused(fimaq("report", run, "--fisher", tmp_path), "fisher.json")


def test_bad_requests_are_refused_before_any_work(
    world: World, finished: Path, unfinished: Path, tmp_path: Path
) -> None:
    assert_refused(fimaq("report", unfinished), "incomplete", "--resume")
    assert_refused(fimaq("report", tmp_path), "is not a run directory")
    assert_refused(fimaq("report", finished, "--out", tmp_path / "no" / "r.html"), "a folder that exists")
    assert_refused(fimaq("report", finished, "--out", tmp_path), "cannot be written")
    assert_refused(
        fimaq("report", finished, "--calib", tmp_path / "no", "--out", tmp_path / "r"), "does not exist"
    )
    gone = fimaq("report", finished, "--weights", tmp_path / "no", "--out", tmp_path / "r")
    assert_refused(gone, "does not exist")
    assert not list(tmp_path.iterdir())
