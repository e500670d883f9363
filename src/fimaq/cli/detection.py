"""What `fimaq quantize --task detection` and `fimaq evaluate` do for a detector."""

import contextlib
import copy
from pathlib import Path
from typing import Any

from fimaq.config import Config
from fimaq.errors import InputError

USUAL = {"calib_size": 256, "batch_size": 4, "search_size": 16}
"""What settings are for a detector where nothing else is asked for: its images are large."""


def detection_folders(data: Path, needs_train: bool = True) -> dict[str, Path]:
    """The settings that a COCO folder stands for: its training images, and itself where it can be validated on."""
    from fimaq.data.coco import calibration_folder, find_coco

    folders = {}
    if not data.is_dir():
        raise InputError(f"data folder {data} does not exist: expected a COCO folder with train2017/ and val2017/")
    if needs_train:
        folders["calib"] = calibration_folder(data)
        if folders["calib"] == data:
            raise InputError(f"{data} has neither train2017/ nor train/ with calibration images; give --calib DIR")
    with contextlib.suppress(InputError):
        find_coco(data, "val")
        folders["val"] = data
    return folders


def build(name: str, weights: Path | None, num_classes: int | None, args: dict[str, Any]) -> Any:
    """A detector with weights from a file."""
    from fimaq.detection.build import build_detector
    from fimaq.detection.convert import load_checkpoint

    detector = build_detector(name, num_classes or 80, args)
    if weights is None:
        raise InputError(f"{name} needs --weights FILE: pretrained detectors cannot be fetched by name")
    load_checkpoint(detector, weights)
    return detector


def run_detection(config: Config, out: Path, resume: bool, progress: Any) -> dict[str, Any]:
    """Quantize a detector, and evaluate it where the data has annotations."""
    from fimaq.artifact.run_directory import RunDirectory
    from fimaq.data import load_calibration
    from fimaq.data.coco import CocoSet, calibration_folder, find_coco, pycocotools
    from fimaq.data.detection_image import DetectionPreprocessing
    from fimaq.detection.accuracy import evaluate_detectors
    from fimaq.detection.quantize import quantize_detector
    from fimaq.device import choose_device
    from fimaq.loading import load

    if config.calib is None:
        raise InputError("no calibration images were given: use --data COCO_DIR or --calib DIR")
    assert config.model is not None
    device = choose_device(config.device)
    detector = build(config.model, config.weights, config.num_classes, config.model_args)
    preprocessing = DetectionPreprocessing(*config.image_size)
    progress.note(f"preprocessing: {preprocessing.describe()}")
    coco = None
    if config.val is not None:
        pycocotools("cocoeval")  # what is missing should be said now, not after the work
        coco = CocoSet.open(*find_coco(config.val, "val"))
        progress.note(f"validation: {len(coco.images)} images, {len(coco.category_ids)} categories")
    progress.start("reading calibration images", config.calib_size)
    calibration = load_calibration(
        calibration_folder(config.calib),
        config.calib_size,
        preprocessing.on_canvas,
        config.seed,
        progress=lambda done, total: progress.update(done),
    )
    if calibration.skipped:
        progress.note(f"unreadable images skipped: {len(calibration.skipped)}")
    sizes = [preprocessing.canvas] * len(calibration.images)
    original = copy.deepcopy(detector)
    run = quantize_detector(
        detector, calibration.images, sizes, config, preprocessing, calibration.fingerprint, out, resume, progress
    )
    metrics = dict(run.metrics)
    if coco is not None:
        detectors = {"full_precision": original.to(device), "quantized": load(out, device=str(device))}
        metrics["accuracy"] = evaluate_detectors(detectors, coco, preprocessing, device, progress, config.val_size)  # type: ignore[arg-type]
        RunDirectory.open_existing(out).update_metrics({"accuracy": metrics["accuracy"]})
    return metrics


def evaluate_detection(
    run: Path, data: Path, val_size: int | None, weights: Path | None, device_name: str, progress: Any
) -> dict[str, Any]:
    """AP of a run's detector, full precision beside it where its weights can be had."""
    from fimaq.artifact.run_directory import RunDirectory
    from fimaq.data.coco import CocoSet, find_coco
    from fimaq.data.detection_image import DetectionPreprocessing
    from fimaq.data.inputs import tensor_fingerprint
    from fimaq.detection.accuracy import evaluate_detectors
    from fimaq.device import choose_device
    from fimaq.loading import load

    directory = RunDirectory.open_existing(run)
    device = choose_device(device_name)
    preprocessing = DetectionPreprocessing.from_dict(directory.config["preprocessing"])
    progress.note(f"preprocessing: {preprocessing.describe()}")
    coco = CocoSet.open(*find_coco(data, "val"))
    detectors: dict[str, Any] = {"quantized": load(run, device=str(device))}
    described, given = directory.config["model"], directory.config["given"]
    path = weights or (Path(given["weights"]) if given["weights"] else None)
    if path is not None and (weights is not None or path.is_file()):
        original = build(described["name"], path, described["num_classes"], described["args"])
        if tensor_fingerprint(sorted(original.state_dict().items())) != described["weights"]:
            raise InputError(f"the full-precision weights ({path}) are not those the run was made from")
        detectors = {"full_precision": original.to(device), **detectors}
    else:
        progress.note(f"full precision is left out: its weights ({path}) are not there; give --weights FILE")
    result = evaluate_detectors(detectors, coco, preprocessing, device, progress, val_size)
    result["preprocessing"] = preprocessing.as_dict()
    return result


def print_average_precision(result: dict[str, Any]) -> None:
    """A table of box and mask AP, one row per detector and kind."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None)
    names = ("AP", "AP50", "AP75", "APs", "APm", "APl")
    for column in ("", *names):
        table.add_column(column, justify="right" if column else "left")
    for model in ("full_precision", "quantized"):
        for kind, label in (("bbox", "boxes"), ("segm", "masks")):
            if model in result:
                values = [result[model][kind][name] for name in names]
                shown = ["-" if value is None else f"{value:.1f}" for value in values]
                table.add_row(f"{model.replace('_', ' ')}, {label}", *shown)
    console = Console(highlight=False)
    console.print(table)
    unreadable = result.get("unreadable", 0)  # not in runs of earlier versions
    skipped = f", {unreadable} unreadable left out" if unreadable else ""
    console.print(f"percent, {result['images']} images{skipped}")
