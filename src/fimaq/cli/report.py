"""fimaq report RUN"""

import contextlib
from pathlib import Path
from typing import Annotated, Any

import typer

from fimaq.cli import options


def report(
    run: Annotated[Path, typer.Argument(help="A finished run directory.")],
    out: Annotated[Path | None, typer.Option(help="The file to write. [default: RUN/report.html]")] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with val/ (for accuracy, units and layers), or train/ (for the latter) inside."),
    ] = None,
    calib: Annotated[
        Path | None,
        typer.Option(
            help="Images for units and layers. [default: validation images, else the run's calibration images]"
        ),
    ] = None,
    val: Annotated[
        Path | None, typer.Option(help="Measure accuracy here first, as `evaluate` does; one folder per class.")
    ] = None,
    val_size: Annotated[
        int | None,
        typer.Option(min=1, help="Labelled images, evenly spread. [default: all; of a classifier on a CPU: 500]"),
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
        options.print_json(result)
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
        _measure_detector(material, data or val, val_size, weights, device_name, progress)
    else:
        if val is not None:
            size = val_size or (500 if device.type == "cpu" else None)
            _measure_accuracy(material, val, size, class_map, weights, str(device), progress)
        _measure_units(material, calib, data, val, weights, count, device, progress)
    size_in_bytes = store(material, target)
    units = [] if material.sensitivity is None else material.sensitivity.units
    return {
        "report": target,
        "bytes": size_in_bytes,
        "accuracy": material.metrics.get("accuracy"),
        "missing": material.missing,
        "hurting_most": [
            {"unit": unit.unit, "kl_divergence": unit.kl, "output_error": unit.output.relative}
            for unit in sorted(units, key=lambda unit: unit.kl, reverse=True)[:3]
        ],
    }


def _measure_detector(
    material: Any, folder: Path | None, val_size: int | None, weights: Path | None, device: str, progress: Any
) -> None:
    from fimaq.cli.detection import evaluate_detection

    if folder is not None:
        result = evaluate_detection(material.path, folder, val_size, weights, device, progress)
        _show_accuracy(material, result, progress)


def _show_accuracy(material: Any, accuracy: dict[str, Any], progress: Any) -> None:
    """Into the report, and into the run's metrics unless that would lose one of as many images or more."""
    from fimaq.artifact.run_directory import RunDirectory
    from fimaq.cli.evaluate import store_accuracy

    directory = RunDirectory.open_existing(material.path)
    stored = directory.read_accuracy().get("images")
    if isinstance(stored, int) and stored >= accuracy["images"]:
        progress.note(f"metrics.json keeps its accuracy on {stored} images; `fimaq evaluate` would replace it")
    else:
        store_accuracy(directory, accuracy, progress)
    material.metrics["accuracy"] = accuracy


def _measure_accuracy(
    material: Any,
    val: Path,
    size: int | None,
    class_map: Path | None,
    weights: Path | None,
    device: str,
    progress: Any,
) -> None:
    """Accuracy, and disagreements on the labelled images."""
    from fimaq.cli.evaluate import evaluate_run
    from fimaq.data import Preprocessing, build_transform, validation_set
    from fimaq.errors import InputError
    from fimaq.report.disagreements import Disagreements, class_names

    stored = material.config.get("preprocessing")
    found = Disagreements(Preprocessing.from_dict(stored) if stored else None)

    def observe(images: Any, targets: Any, logits: dict[str, Any]) -> None:
        if "full_precision" in logits:
            found.add(images, logits["full_precision"], logits["quantized"], targets)

    result = evaluate_run(material.path, None, val, None, size, class_map, weights, 64, device, progress, observe)
    _show_accuracy(material, result, progress)
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
    val: Path | None,
    weights: Path | None,
    count: int,
    device: Any,
    progress: Any,
) -> None:
    """Sensitivity and what else needs both models, where they and images can be had; else why not."""
    from fimaq.cli.classifier import images_for
    from fimaq.cli.evaluate import full_precision
    from fimaq.loading import load
    from fimaq.report.disagreements import class_names
    from fimaq.report.material import measure

    config = material.config
    model, stored = config["model"], config["preprocessing"]
    material.class_names = material.class_names or class_names(model["num_classes"])
    if model["name"] is None or stored is None:
        material.missing = "the run was made in Python from a model object; use fimaq.report.write.write_report"
        return
    folder, called = _images_for_units(config["given"], calib, data, val)
    if folder is None:
        material.missing = f"{called} are not there; give --calib DIR or --data DIR"
        return
    original = full_precision(config, weights, progress)
    if original is None:
        material.missing = "the full-precision weights cannot be had; give --weights FILE"
        return
    images = images_for(config, folder, count, progress)
    material.images_from = called
    measure(material, original, load(material.path, device=str(device)), images, device, progress)


def _images_for_units(
    given: dict[str, Any], calib: Path | None, data: Path | None, val: Path | None
) -> tuple[Path | None, str]:
    """The folder, if there is one, and what to call its images. Rather such as the run was not fitted to: on its
    calibration images errors are smaller, and other units seem to be the worst."""
    recorded = {key: Path(str(given[key])) for key in ("calib", "val") if given.get(key)}
    if calib is not None:
        return calib, f"images from {calib}"
    val = val or recorded.get("val")
    if val is not None and val.is_dir():
        return val, f"validation images from {val}, which it was not fitted to"
    folder = data / "train" if data is not None else recorded.get("calib")
    if folder is None or not (data or folder.is_dir()):
        return None, f"the run's calibration images ({folder})"
    return folder, f"calibration images from {folder}, which it was fitted to"
