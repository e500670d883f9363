"""fimaq fisher MODEL --unit blocks.5 --data DIR --out DIR"""

from pathlib import Path
from typing import Annotated, Any

import typer

from fimaq.cli import options
from fimaq.cli.classifier import open_classifier
from fimaq.config import Config


def fisher(
    model: Annotated[str, typer.Argument(help="timm model name, such as deit_tiny_patch16_224.")],
    unit: Annotated[str, typer.Option(help="The unit whose output is looked at, such as blocks.5.")],
    out: Annotated[Path, typer.Option(help="Folder for fisher.png, rank.png, fisher.json, fisher.safetensors.")],
    data: Annotated[Path | None, typer.Option(help="Folder with train/ (calibration) inside.")] = None,
    calib: options.Calib = None,
    weights: options.Weights = None,
    calib_size: Annotated[int, typer.Option(help="Calibration images.")] = 64,
    exact_size: Annotated[int, typer.Option(min=1, help="Images the complete matrix is averaged over.")] = 16,
    token: Annotated[int, typer.Option(help="Which token; 0 is the class token where there is one.")] = 0,
    channels: Annotated[
        int | None, typer.Option(help="Only the first so many channels of the token. [default: all]")
    ] = None,
    bits: options.Bits = None,
    preset: options.Preset = None,
    rank: Annotated[int, typer.Option(help="Largest rank k of the low-rank approximation.")] = 15,
    alpha: options.Alpha = None,
    averages: Annotated[
        str | None,
        typer.Option(help=f"signed (paper) or absolute (released code). {options.default_of('averages')}"),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help=f"Logits are divided by it. {options.default_of('temperature')}")
    ] = None,
    crop_pct: options.CropPct = None,
    model_arg: options.ModelArg = None,
    num_classes: options.NumClasses = None,
    linear: Annotated[bool, typer.Option("--linear", help="Linear colours instead of logarithmic ones.")] = False,
    device: options.Device = None,
    seed: Annotated[int | None, typer.Option(help=f"Draws the images. {options.default_of('seed')}")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Picture the Fisher matrix of one token beside its diagonal, low-rank and DPLR approximations.

    Example: `fimaq fisher deit_tiny_patch16_224 --data imagenet --unit blocks.5 --out pictures`
    """
    from fimaq.cli.values import build_config, parse_pairs
    from fimaq.errors import InputError
    from fimaq.progress import for_terminal

    flags = {name: value for name, value in locals().items() if name in Config.model_fields}
    flags["model_args"] = parse_pairs(model_arg, "--model-arg") if model_arg else None
    settings = build_config(flags, None, data)
    if settings.calib is None:
        raise InputError("no calibration images were given: use --data DIR (with train/ inside) or --calib DIR")
    with for_terminal() as progress:
        result = _draw(settings, unit, out, token, channels, exact_size, not linear, progress)
    if as_json:
        options.print_json(result)
        return
    typer.echo(f"relative error to the complete matrix of {result['channels']} channels, rank {result['rank']}:")
    for name, error in result["errors"].items():
        typer.echo(f"  {name:10} {error:.3f}, to its magnitudes {result['errors_to_magnitudes'][name]:.3f}")
    best = result["best_possible"]
    typer.echo(f"  {'identity':10} {result['error_of_identity']:.3f} (mean squared error)")
    typer.echo(f"best possible: diagonal {best['diagonal']:.3f}, low rank {best['low rank'][-1]:.3f}")
    typer.echo(f"{out} is written after {result['seconds']:.0f} s")


def _draw(
    config: Config,
    unit: str,
    out: Path,
    token: int,
    channels: int | None,
    exact_size: int,
    log: bool,
    progress: Any,
) -> dict[str, Any]:
    """Load model and images, compute the figure, write it."""
    from fimaq.data import build_transform, load_calibration
    from fimaq.device import choose_device
    from fimaq.report.fisher_figure import check_folder, fisher_figure, write_figure

    check_folder(out)
    choose_device(config.device)
    assert config.calib is not None
    model, preprocessing = open_classifier(config, progress)
    calibration = load_calibration(config.calib, config.calib_size, build_transform(preprocessing), config.seed)
    figure = fisher_figure(model, calibration.images, unit, config, token, channels, exact_size, progress)
    figure.details["data_fingerprint"] = calibration.fingerprint
    write_figure(figure, out, log)
    return {"out": out, **figure.as_dict()}
