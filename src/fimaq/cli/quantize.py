"""fimaq quantize MODEL --data DIR --bits w4a4 --out RUN"""

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fimaq.cli import options
from fimaq.cli.classifier import open_classifier
from fimaq.config import Config, Heads
from fimaq.errors import InputError

if TYPE_CHECKING:
    from fimaq.ranks import Ranks


def quantize(
    model: Annotated[
        str, typer.Argument(help="timm model name, such as deit_tiny_patch16_224; or a detector, see --task.")
    ],
    out: Annotated[Path, typer.Option(help="Run directory to make.")],
    task: Annotated[
        str | None, typer.Option(help="classification or detection. [default: classification]")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Folder with train/ (calibration) and val/ inside.")] = None,
    calib: options.Calib = None,
    val: options.Val = None,
    weights: options.Weights = None,
    bits: options.Bits = None,
    method: Annotated[
        str | None,
        typer.Option(help=f"rtn, qdrop, brecq, diag, rank1, lowrank or fima-q. {options.default_of('method')}"),
    ] = None,
    preset: options.Preset = None,
    iters: options.Iters = None,
    rank: Annotated[
        int | None,
        typer.Option(help="Rank k of the Fisher approximation. [default: 15; below 600 iterations iters / 40]"),
    ] = None,
    alpha: options.Alpha = None,
    damping: options.Damping = None,
    calib_size: options.CalibSize = None,
    val_size: options.ValSize = None,
    batch_size: options.BatchSize = None,
    parts: Annotated[
        int | None,
        typer.Option(help="Add gradients up as this many processes would, for their bits. [default: processes]"),
    ] = None,
    crop_pct: options.CropPct = None,
    image_size: Annotated[
        str | None, typer.Option(help="Detection: short and long side to fit images into. [default: 800,1333]")
    ] = None,
    heads: Annotated[
        Heads | None,
        typer.Option(
            help="Detection: whether box and mask heads are learned, or their ranges searched, as published."
        ),
    ] = None,
    model_arg: options.ModelArg = None,
    num_classes: options.NumClasses = None,
    class_map: options.ClassMap = None,
    allow_float: Annotated[
        bool | None, typer.Option("--allow-float", help="Quantize the rest where an operator must stay float.")
    ] = None,
    bit_exact: Annotated[
        bool | None,
        typer.Option("--bit-exact", help="Exported files give mostly the run's bits in onnxruntime; slower."),
    ] = None,
    device: options.Device = None,
    precision: options.Precision = None,
    compile: Annotated[
        bool | None,
        typer.Option(help="Fuse operators of a step. [default: on a GPU from 1000 iterations on]"),
    ] = None,
    memory_budget: options.MemoryBudget = None,
    host_budget: options.HostBudget = None,
    seed: Annotated[int | None, typer.Option(help=f"Same seed, same bits. {options.default_of('seed')}")] = None,
    tensorboard: Annotated[
        bool | None, typer.Option("--tensorboard", help="Also write curves to OUT/tensorboard.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with the same keys; flags win.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False,
    predicted: Annotated[
        bool, typer.Option("--dry-run", help="Tell what time and memory the run would take; write nothing.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Quantize a model with the help of unlabelled images.

    Example: `fimaq quantize deit_tiny_patch16_224 --data imagenet --bits w4a4 --out runs/deit-tiny`

    Several processes, one per GPU: `torchrun --nproc-per-node 8 -m fimaq quantize ...`

    Detector: `fimaq quantize mask_rcnn_swin_t --task detection --data coco --weights FILE --out runs/mask-rcnn`
    """
    from fimaq.artifact.run_directory import RunDirectory
    from fimaq.artifact.scalars import require_tensorboard
    from fimaq.cli.detection import print_average_precision, run_detection
    from fimaq.cli.dry_run import dry_run
    from fimaq.cli.values import build_config, parse_pairs, parse_value
    from fimaq.errors import InputError
    from fimaq.progress import Silent, for_terminal
    from fimaq.together import joined_ranks

    flags = {name: value for name, value in locals().items() if name in Config.model_fields}
    with joined_ranks() as ranks:
        flags["model_args"] = parse_pairs(model_arg, "--model-arg") if model_arg else None
        flags["image_size"] = None if image_size is None else parse_value(image_size)
        settings = build_config(flags, config, data)
        if predicted:
            if ranks.rank == 0:
                dry_run(settings, as_json)
            return
        if settings.tensorboard:
            require_tensorboard()
        RunDirectory.check(out, resume)  # before images are read
        with for_terminal() if ranks.rank == 0 else Silent() as progress:
            if settings.task == "classification":
                metrics = run_classification(settings, out, resume, progress, ranks)
            elif ranks.size == 1:
                metrics = run_detection(settings, out, resume, progress)
            else:
                raise InputError(f"--task detection runs in one process, and torchrun started {ranks.size}")
    if ranks.rank > 0:
        return
    if as_json:
        options.print_json({"run": out, **metrics})
        return
    try:
        if settings.task == "detection" and "accuracy" in metrics:
            print_average_precision(metrics.pop("accuracy"))
        _print_summary(out, metrics, "object or not" if settings.task == "detection" else "top-1")
    except (LookupError, TypeError, ValueError, AttributeError) as error:  # those of a run found finished
        raise InputError(f"{out}/metrics.json is damaged: {type(error).__name__} {error}") from None


def run_classification(config: Config, out: Path, resume: bool, progress: Any, ranks: "Ranks") -> dict[str, Any]:
    """Quantize a classifier, and evaluate it where there are validation images: the first rank does."""
    from fimaq.accuracy import evaluate_models
    from fimaq.artifact.run_directory import RunDirectory
    from fimaq.data import (
        build_transform,
        load_calibration,
        load_share,
        validation_batches,
        validation_set,
    )
    from fimaq.device import choose_device
    from fimaq.loading import load
    from fimaq.pipeline import run_quantization

    if config.calib is None:
        raise InputError("no calibration images were given: use --data DIR (with train/ inside) or --calib DIR")
    device = ranks.place(choose_device(config.device))
    model, preprocessing = open_classifier(config, progress)
    transform = build_transform(preprocessing)
    dataset = None
    if config.val is not None and ranks.rank == 0:
        limit = config.val_size or (500 if device.type == "cpu" else None)
        classes = getattr(model, "num_classes", 0)
        cfg = getattr(model, "pretrained_cfg", None)
        dataset, mapping = validation_set(config.val, classes, transform, config.class_map, cfg, limit)
        progress.note(f"validation: {len(dataset)} images, classes by {mapping.source}")
        next(iter(validation_batches(dataset, 1)))  # unreadable images should fail now, not after the work
    progress.start("reading calibration images", config.calib_size)
    drawn = (config.calib, config.calib_size, transform, config.seed)
    if ranks.size == 1:
        calibration = load_calibration(*drawn, progress=lambda done, total: progress.update(done))
    else:
        calibration = load_share(
            *drawn, ranks, lambda done, total: progress.update(done * config.calib_size // total)
        )
    if calibration.skipped:
        path, reason = calibration.skipped[0]
        progress.note(f"unreadable images skipped: {len(calibration.skipped)}, such as {path} ({reason})")

    run = run_quantization(
        copy.deepcopy(model),
        calibration.images,
        config,
        preprocessing,
        calibration.fingerprint,
        out,
        resume,
        progress,
        ranks=ranks,
    )
    metrics = dict(run.metrics)
    if dataset is not None:
        models = {"full_precision": model.to(device), "quantized": load(out, device=str(device))}
        metrics["accuracy"] = evaluate_models(models, dataset, 64, device, progress)
        RunDirectory.open_existing(out).update_metrics({"accuracy": metrics["accuracy"]})
    return metrics


def _print_summary(out: Path, metrics: dict[str, Any], decision: str) -> None:
    from rich.console import Console

    say = Console(highlight=False, soft_wrap=True, markup=False).print
    accuracy, fidelity = metrics.get("accuracy", {}), metrics["fidelity"]
    if "full_precision" in accuracy:
        full, quantized = accuracy["full_precision"], accuracy["quantized"]
        say(
            f"top-1 {quantized['top1']:.2f} % (full precision {full['top1']:.2f} %), "
            f"top-5 {quantized['top5']:.2f} % ({full['top5']:.2f} %), on {accuracy['images']} images"
        )
        say(
            f"KL to full precision {accuracy['kl_divergence']:.4f}, same top-1 in {accuracy['agreement']:.1f} % "
            "of these images"
        )
    else:
        say(
            f"KL to full precision {fidelity['kl_divergence']:.4f}, same {decision} in "
            f"{fidelity['agreement']:.1f} % on the calibration images, which it was fitted to: others say more"
        )
    if "size" in metrics:
        size = metrics["size"]
        say(f"{size['quantized_bytes'] / 1e6:.2f} MB, full precision {size['full_precision_bytes'] / 1e6:.2f} MB")
    if metrics["stayed_float"]:
        say("stayed in float: " + "; ".join(metrics["stayed_float"]))
    say(f"{out} is complete after {metrics['seconds']:.0f} s")
