"""From COCO-format data to a quantized detector and its average precision, by the command line."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from benchmark_scripts import benchmark_script
from command_line import assert_refused, fimaq
from safetensors.torch import save_file

from fimaq.detection.build import build_detector

MODEL = "mask_rcnn_swin_t"
ARGUMENTS = {
    "embed_dim": 12,
    "depths": (1, 1, 1, 1),
    "num_heads": (1, 2, 2, 4),
    "window_size": 4,
    "channels": 16,
    "fc_channels": 32,
}
QUICK = ("--calib-size", "8", "--batch-size", "4", "--iters", "4", "--rank", "1", "--device", "cpu", "--json")


def model_arguments() -> list[str]:
    texts = {k: ",".join(map(str, v)) if isinstance(v, tuple) else str(v) for k, v in ARGUMENTS.items()}
    return [part for key, text in texts.items() for part in ("--model-arg", f"{key}={text}")]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shapes = benchmark_script("make_shapes")
    folder = tmp_path_factory.mktemp("coco") / "shapes"
    for split, count in (("train", 10), ("val", 4)):
        shapes.write_split(folder, split, count, 96, seed=0, processes=1)
    return folder


@pytest.fixture(scope="module")
def weights(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    classes = len(json.loads((data / "annotations" / "instances_val.json").read_text())["categories"])
    path = tmp_path_factory.mktemp("weights") / "detector.safetensors"
    save_file(build_detector(MODEL, classes, ARGUMENTS).state_dict(), path)
    return path


def command(data: Path, weights: Path, out: Path, *more: str) -> list[str | Path]:
    classes = len(json.loads((data / "annotations" / "instances_val.json").read_text())["categories"])
    given = ["quantize", MODEL, "--task", "detection", "--data", data, "--weights", weights, "--out", out]
    return [*given, "--image-size", "96,96", "--num-classes", str(classes), *model_arguments(), *QUICK, *more]


@pytest.fixture(scope="module")
def run(data: Path, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("runs") / "detector"
    outcome = fimaq(*command(data, weights, out))
    assert outcome.code == 0, outcome.err
    return out, json.loads(outcome.out)


def test_quantize_ends_with_box_and_mask_precision_of_both_models(run: tuple[Path, dict]) -> None:
    accuracy = run[1]["accuracy"]
    assert accuracy["images"] == 4
    for model in ("full_precision", "quantized"):
        for kind in ("bbox", "segm"):
            assert set(accuracy[model][kind]) == {"AP", "AP50", "AP75", "APs", "APm", "APl"}


def test_evaluate_gives_the_same_again(run: tuple[Path, dict], data: Path) -> None:
    outcome = fimaq("evaluate", run[0], "--data", data, "--device", "cpu", "--json")
    assert outcome.code == 0, outcome.err
    result = json.loads(outcome.out)
    assert {key: result[key] for key in run[1]["accuracy"]} == run[1]["accuracy"]
    assert result["preprocessing"]["short"] == 96


def test_evaluate_prints_a_table(run: tuple[Path, dict], data: Path) -> None:
    outcome = fimaq("evaluate", run[0], "--data", data, "--device", "cpu", "--val-size", "2")
    assert "quantized, masks" in outcome.out
    assert "percent, 2 images" in outcome.out


def test_unreadable_validation_images_are_left_out_and_counted(
    run: tuple[Path, dict], data: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(data, tmp_path / "data")
    image = min((copy / "val").iterdir())
    image.write_bytes(image.read_bytes()[: image.stat().st_size // 2])
    given = ("evaluate", shutil.copytree(run[0], tmp_path / "run"), "--data", copy, "--device", "cpu")
    shown = fimaq(*given)
    assert "percent, 3 images, 1 unreadable left out" in shown.out
    result = json.loads(fimaq(*given, "--json").out)
    assert (result["images"], result["unreadable"]) == (3, 1)
    for path in (copy / "val").iterdir():
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert_refused(fimaq(*given), "none of the 4 validation images can be read")


@pytest.mark.parametrize("flag", ["--batch-size", "--crop-pct", "--class-map"])
def test_evaluate_refuses_what_a_detector_has_no_use_for(run: tuple[Path, dict], data: Path, flag: str) -> None:
    assert_refused(fimaq("evaluate", run[0], "--data", data, flag, "1"), f"{flag} 1", "detector")


def test_calibration_images_of_another_coco_folder_are_its_training_images(
    run: tuple[Path, dict], data: Path, weights: Path, tmp_path: Path
) -> None:
    for part in ("val", "annotations"):
        shutil.copytree(data / part, tmp_path / "labelled" / part)
    outcome = fimaq(*command(tmp_path / "labelled", weights, tmp_path / "run", "--calib", data, "--method", "rtn"))
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["accuracy"]["images"] == 4
    used = [json.loads((path / "config.json").read_text())["data"] for path in (run[0], tmp_path / "run")]
    assert used[0] == used[1]


def test_a_finished_run_is_not_made_again(run: tuple[Path, dict], data: Path, weights: Path) -> None:
    outcome = fimaq(*command(data, weights, run[0], "--resume"))
    assert outcome.code == 0, outcome.err
    assert "nothing to do" in outcome.err
    assert json.loads(outcome.out)["accuracy"] == run[1]["accuracy"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--num-classes", "5"), "does not fit the detector"),
        (("--preset", "released"), "use preset 'deploy'"),
        (("--image-size", "200,100"), "short side"),
        (("--calib-size", "11"), "11"),
        (("--model-arg", "width=3"), "no argument 'width'"),
    ],
)
def test_what_does_not_fit_is_refused(
    more: tuple[str, ...], said: str, data: Path, weights: Path, tmp_path: Path
) -> None:
    outcome = fimaq(*command(data, weights, tmp_path / "run", *more))
    assert outcome.code != 0
    assert said in outcome.err
    assert not (tmp_path / "run").exists()


def test_a_detector_needs_weights(data: Path, tmp_path: Path) -> None:
    outcome = fimaq("quantize", MODEL, "--task", "detection", "--data", data, "--out", tmp_path / "run")
    assert "needs --weights FILE" in outcome.err


def test_an_unknown_detector_is_refused(data: Path, weights: Path, tmp_path: Path) -> None:
    given = ("--task", "detection", "--data", data, "--weights", weights, "--out", tmp_path / "run")
    outcome = fimaq("quantize", "mask_rcnn_swin_x", *given)
    assert "mask_rcnn_swin_t" in outcome.err


def test_a_classification_folder_is_not_coco(tmp_path: Path, weights: Path) -> None:
    outcome = fimaq(
        "quantize",
        MODEL,
        "--task",
        "detection",
        "--data",
        tmp_path,
        "--weights",
        weights,
        "--out",
        tmp_path / "run",
    )
    assert "train2017" in outcome.err


def test_a_detector_is_not_exported_yet(run: tuple[Path, dict]) -> None:
    outcome = fimaq("export", run[0])
    assert outcome.code != 0
    assert "detector" in outcome.err


def test_a_report_shows_precision_and_says_what_it_leaves_out(run: tuple[Path, dict], tmp_path: Path) -> None:
    outcome = fimaq("report", run[0], "--out", tmp_path / "r.html", "--device", "cpu", "--json")
    assert outcome.code == 0, outcome.err
    assert "not measured yet" in json.loads(outcome.out)["missing"]
    text = (tmp_path / "r.html").read_text()
    assert "COCO average precision in percent, 4 images" in text
    assert all(unit["unit"] in text for unit in run[1]["units"])
    assert all(name in text for name in run[1]["stayed_float"])
