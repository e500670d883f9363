"""fimaq report RUN"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fimaq.cli import options


def report(
    run: Annotated[Path, typer.Argument(help="A finished run directory.")],
    out: Annotated[Path | None, typer.Option(help="The file to write. [default: RUN/report.html]")] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with train/ (for units and layers) and val/ (for accuracy) inside."),
    ] = None,
    calib: Annotated[
        Path | None, typer.Option(help="Images for units and layers. [default: where the run found its own]")
    ] = None,
    val: Annotated[
        Path | None, typer.Option(help="Measure accuracy here first, as `evaluate` does; one folder per class.")
    ] = None,
    val_size: Annotated[
        int | None, typer.Option(min=1, help="Labelled images, evenly spread. [default: all; 500 on a CPU]")
    ] = None,
    class_map: options.ClassMap = None,
    weights: Annotated[
        Path | None, typer.Option(help="Full-precision weights, if they moved since the run.")
    ] = None,
    images: Annotated[int, typer.Option(min=2, help="Images that units and layers are measured on.")] = 64,
    fisher: Annotated[
        Path | None, typer.Option(help="Pictures of `fimaq fisher` to include. [default: RUN/fisher, if there]")
    ] = None,
    stored: Annotated[bool, typer.Option("--stored", help="Measure nothing; show what the run holds.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: options.AsJson = False,
) -> None:
    """One HTML file about a run: accuracy, size, speed, what hurts, what was learned, how to repeat it.

    It opens from disk in any browser and loads nothing. What a run does not hold is measured where the
    full-precision weights and images can be had, and otherwise said to be missing. Written anew each time.

    Example: `fimaq report runs/deit-tiny --data imagenet`

    Only what is stored already, in seconds: `fimaq report runs/deit-tiny --stored`
    """
    from fimaq.progress import for_terminal

    with for_terminal() as progress:
        result = _report(
            run, out, data, calib, val, val_size, class_map, weights, images, fisher, stored, device, progress
        )
    if as_json:
        json.dump(result, sys.stdout)
        sys.stdout.write("\n")
        return
    if result["missing"]:
        typer.echo(f"units and layers are not shown: {result['missing']}")
    for unit in result["hurting_most"]:
        typer.echo(f"quantizing {unit['unit']} alone: KL {unit['kl_divergence']:.4f}")
    typer.echo(f"{result['report']}: {result['bytes'] / 1e6:.2f} MB")


def _report(
    run: Path,
    out: Path | None,
    data: Path | None,
    calib: Path | None,
    val: Path | None,
    val_size: int | None,
    class_map: Path | None,
    weights: Path | None,
    count: int,
    fisher: Path | None,
    only_stored: bool,
    device_name: str,
    progress: Any,
) -> dict[str, Any]:
    from fimaq.artifact.files import json_ready
    from fimaq.artifact.run_directory import RunDirectory
    from fimaq.device import choose_device
    from fimaq.report.material import read_run
    from fimaq.report.write import report_file, store

    target = report_file(run, out)
    material = read_run(run, fisher)
    device = choose_device(device_name)
    if val is None and data is not None and (data / "val").is_dir():
        val = data / "val"
    if only_stored:
        material.missing = "nothing was to be measured (--stored)"
    elif material.task == "detection":
        material.missing = "units, layers and images of detectors are not measured yet"
        _measure_detector(run, data or val, val_size, weights, device_name, progress)
    else:
        if val is not None:
            size = val_size or (500 if device.type == "cpu" else None)
            _measure_accuracy(material, val, size, class_map, weights, str(device), progress)
        _measure_units(material, calib, data, weights, count, device, progress)
    material.metrics = RunDirectory.open_existing(run).read_metrics()
    size_in_bytes = store(material, target)
    units = [] if material.sensitivity is None else material.sensitivity.units
    result: dict[str, Any] = json_ready(
        {
            "report": target,
            "bytes": size_in_bytes,
            "accuracy": material.metrics.get("accuracy"),
            "missing": material.missing,
            "hurting_most": [
                {"unit": unit.unit, "kl_divergence": unit.kl, "output_error": unit.output.relative}
                for unit in sorted(units, key=lambda unit: unit.kl, reverse=True)[:3]
            ],
        }
    )
    return result


def _measure_detector(
    run: Path, folder: Path | None, val_size: int | None, weights: Path | None, device: str, progress: Any
) -> None:
    from fimaq.cli.detection import evaluate_detection

    if folder is not None:
        evaluate_detection(run, folder, val_size, weights, device, progress)


def _measure_accuracy(
    material: Any,
    val: Path,
    size: int | None,
    class_map: Path | None,
    weights: Path | None,
    device: str,
    progress: Any,
) -> None:
    """Accuracy into the run's metrics; disagreements on the labelled images into `material`."""
    from fimaq.cli.evaluate import evaluate_run
    from fimaq.data import Preprocessing, build_transform, validation_set
    from fimaq.errors import InputError
    from fimaq.report.disagreements import Disagreements, class_names

    stored = material.config.get("preprocessing")
    found = Disagreements(Preprocessing.from_dict(stored) if stored else None)

    def observe(images: Any, targets: Any, logits: dict[str, Any]) -> None:
        if "full_precision" in logits:
            found.add(images, logits["full_precision"], logits["quantized"], targets)

    evaluate_run(material.path, None, val, None, size, class_map, weights, 64, device, progress, observe)
    if found.images:
        material.disagreements, material.disagreements_on = found, f"labelled images from {val}"
        classes = material.config["model"]["num_classes"]
        transform = build_transform(Preprocessing.from_dict(stored))
        with contextlib.suppress(InputError):  # folders that only label names inside the model tell apart
            _, mapped = validation_set(val, classes, transform, class_map)
            material.class_names = class_names(classes, folders=mapped.indices)


def _measure_units(
    material: Any,
    calib: Path | None,
    data: Path | None,
    weights: Path | None,
    count: int,
    device: Any,
    progress: Any,
) -> None:
    """Sensitivity and what else needs both models, where they and images can be had; else why not."""
    from fimaq.cli.evaluate import full_precision
    from fimaq.data import Preprocessing, build_transform, load_calibration
    from fimaq.data.folder import list_images
    from fimaq.loading import load
    from fimaq.report.disagreements import class_names
    from fimaq.report.material import measure

    config = material.config
    model, given, stored = config["model"], config["given"], config["preprocessing"]
    material.class_names = material.class_names or class_names(model["num_classes"])
    if model["name"] is None or stored is None:
        material.missing = "the run was made in Python from a model object; use fimaq.report.write.write_report"
        return
    folder = calib or (data / "train" if data is not None else None)
    recorded = Path(given["calib"]) if given.get("calib") else None
    if folder is None and (recorded is None or not recorded.is_dir()):
        material.missing = (
            f"the run's calibration images ({recorded}) are not there; give --calib DIR or --data DIR"
        )
        return
    folder = folder or recorded
    assert folder is not None
    original = full_precision(config, weights, progress)
    if original is None:
        material.missing = "the full-precision weights cannot be had; give --weights FILE"
        return
    count = min(count, len(list_images(folder)))
    transform = build_transform(Preprocessing.from_dict(stored))
    progress.note(f"reading {count} images from {folder}")
    images = load_calibration(folder, count, transform, config["settings"]["seed"]).images
    material.images_from = f"calibration images from {folder}"
    measure(material, original, load(material.path, device=str(device)), images, device, progress)
