"""fimaq evaluate RUN --data DIR"""

from pathlib import Path
from typing import Annotated, Any

import typer

from fimaq.cli import options
from fimaq.errors import FimaqError, InputError


def evaluate(
    run: Annotated[Path, typer.Argument(help="A finished run directory.")],
    data: Annotated[
        Path | None, typer.Option(help="Folder with val/ inside; for a detector, a COCO folder.")
    ] = None,
    val: Annotated[Path | None, typer.Option(help="Validation images, one folder per class.")] = None,
    crop_pct: Annotated[float | None, typer.Option(help="Overrides the run's stored preprocessing.")] = None,
    val_size: Annotated[
        int | None, typer.Option(help="Only so many images, evenly spread. [default: all]")
    ] = None,
    class_map: Annotated[Path | None, typer.Option(help='JSON {"folder": index}.')] = None,
    weights: Annotated[
        Path | None, typer.Option(help="Full-precision weights, if they moved since the run.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Images at a time, of a classifier. [default: 64]")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: options.AsJson = False,
) -> None:
    """Top-1 and top-5 of a run, or a detector's box and mask AP, full precision beside quantized.

    Preprocessing is the run's own; class folders are mapped to classes by name.
    """
    from fimaq.artifact.run_directory import RunDirectory
    from fimaq.cli.detection import evaluate_detection, print_average_precision
    from fimaq.progress import for_terminal

    directory = RunDirectory.open_existing(run)
    directory.read_accuracy()  # a damaged file is found before the work, not after it
    detection = directory.task == "detection"
    with for_terminal() as progress:
        if detection:
            others = {"--crop-pct": crop_pct, "--class-map": class_map, "--batch-size": batch_size}
            for flag, value in others.items():
                if value is not None:
                    raise InputError(f"{flag} {value} is for classifiers, and {run} is a detector's: leave it out")
            folder = data or val
            if folder is None:
                raise InputError("no validation data was given: use --data COCO_DIR")
            result = evaluate_detection(run, folder, val_size, weights, device, progress)
        else:
            result = evaluate_run(
                run, data, val, crop_pct, val_size, class_map, weights, batch_size or 64, device, progress
            )
        store_accuracy(directory, result, progress)
    if as_json:
        options.print_json(result)
    elif detection:
        print_average_precision(result)
    else:
        _print_table(result)


def evaluate_run(
    run: Path,
    data: Path | None,
    val: Path | None,
    crop_pct: float | None,
    val_size: int | None,
    class_map: Path | None,
    weights: Path | None,
    batch_size: int,
    device_name: str,
    progress: Any,
    observe: Any = None,
) -> dict[str, Any]:
    """Measure the accuracy of a classifier's run. `observe`: see `fimaq.accuracy.Observe`."""
    from dataclasses import replace

    from fimaq.accuracy import evaluate_models
    from fimaq.artifact.run_directory import RunDirectory
    from fimaq.data import Preprocessing, build_transform, validation_set
    from fimaq.device import choose_device
    from fimaq.loading import load

    directory = RunDirectory.open_existing(run)
    device = choose_device(device_name)
    folder = val or (data / "val" if data is not None else None)
    if folder is None:
        raise InputError("no validation images were given: use --data DIR (with val/ inside) or --val DIR")
    quantized = load(run, device=str(device))
    if directory.config["preprocessing"] is None:
        raise InputError(f"{run} was made without image preprocessing; evaluate it in Python")
    preprocessing = Preprocessing.from_dict(directory.config["preprocessing"])
    if crop_pct is not None:
        preprocessing = replace(preprocessing, crop_pct=crop_pct)
    progress.note(f"preprocessing: {preprocessing.describe()}")
    cfg = getattr(quantized, "pretrained_cfg", None)
    classes = directory.config["model"].get("num_classes") or getattr(quantized, "num_classes", 0)
    dataset, mapping = validation_set(folder, classes, build_transform(preprocessing), class_map, cfg, val_size)
    progress.note(f"validation: {len(dataset)} images, classes by {mapping.source}")
    models = {"quantized": quantized}
    original = full_precision(directory.config, weights, progress)
    if original is not None:
        models["full_precision"] = original.to(device)
    result = evaluate_models(models, dataset, batch_size, device, progress, observe)
    result["preprocessing"] = preprocessing.as_dict()
    result["classes_by"] = mapping.source
    return result


def store_accuracy(directory: Any, accuracy: dict[str, Any], progress: Any) -> None:
    """Put it into the run's metrics. Where they cannot be written, what was measured is shown all the same."""
    before = directory.read_accuracy().get("images")
    if before is not None and before != accuracy["images"]:
        progress.note(f"this replaces the run's accuracy on {before} images")
    try:
        directory.update_metrics({"accuracy": accuracy})
    except FimaqError as error:
        progress.note(f"the accuracy is not stored: {error}")


def full_precision(config: dict[str, Any], weights: Path | None, progress: Any) -> Any:
    """The original model, when its weights can still be had and are the ones the run was made from."""
    import timm

    from fimaq.data.inputs import tensor_fingerprint
    from fimaq.models.build import build_model

    described, given = config["model"], config["given"]
    path = weights or (Path(str(given["weights"])) if given.get("weights") else None)
    not_pretrained = (
        "full precision is left out: the run was not made from timm's pretrained weights; give --weights FILE"
    )
    published = timm.get_pretrained_cfg(described["name"]) if path is None else None
    if published is not None and published.num_classes != described["num_classes"]:
        progress.note(not_pretrained)  # without asking the network for weights of another head
        return None
    try:
        model = build_model(described["name"], path, described["num_classes"], described["args"])
    except InputError as error:
        if weights is not None:
            raise
        progress.note(f"full precision is left out: {error}")
        return None
    if tensor_fingerprint(sorted(model.state_dict().items())) == described.get("weights"):
        return model
    if path is not None:
        raise InputError(f"the full-precision weights ({path}) are not those the run was made from")
    progress.note(not_pretrained)
    return None


def _print_table(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None)
    for column in ("", "top-1", "top-5"):
        table.add_column(column, justify="left" if not column else "right")
    for name in ("full_precision", "quantized"):
        if name in result:
            row = result[name]
            table.add_row(name.replace("_", " "), f"{row['top1']:.2f}", f"{row['top5']:.2f}")
    console = Console(highlight=False)
    console.print(table)
    skipped = f", {result['unreadable']} unreadable left out" if result["unreadable"] else ""
    console.print(f"percent of {result['images']} images{skipped}")
    if "agreement" in result:
        console.print(f"same top-1 on {result['agreement']:.1f} %, mean KL {result['kl_divergence']:.4f}")
