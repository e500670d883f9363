"""fimaq export RUN --format onnx|openvino --processor any|vnni"""

from pathlib import Path
from typing import Annotated, Any

import typer

from fimaq.cli import options


def export(
    run: Annotated[Path, typer.Argument(help="A finished run directory, made with preset deploy.")],
    format: Annotated[
        str, typer.Option(help="onnx: QDQ form, for onnxruntime. openvino: model.xml and model.bin.")
    ] = "onnx",
    processor: Annotated[
        str,
        typer.Option(
            help="For format onnx. any: a file that is right on every processor. vnni: faster with 8 bits on both "
            "sides, but wrong on x86 processors without VNNI; refused with format openvino."
        ),
    ] = "any",
    out: Annotated[
        Path | None, typer.Option(help="File to write. [default: RUN/model.onnx or RUN/model.xml]")
    ] = None,
    calib: Annotated[
        Path | None, typer.Option(help="Calibration images, if they moved since the run; to verify on.")
    ] = None,
    verify: Annotated[Path | None, typer.Option(help="Further images to verify on; no labels needed.")] = None,
    verify_size: Annotated[int, typer.Option(min=1, help="Images of each kind to verify on.")] = 256,
    as_json: options.AsJson = False,
) -> None:
    """Write a file that an integer runtime executes, and verify it against the run.

    Example: `fimaq export runs/deit-tiny --format onnx --verify imagenet/val`
    """
    from fimaq.progress import for_terminal

    with for_terminal() as progress:
        record = _export(run, format, processor, out, calib, verify, verify_size, progress)
    if as_json:
        options.print_json(record)
        return
    found = record["verification"]
    target = out or run / record["file"]
    typer.echo(f"{target}: {record['bytes'] / 1e6:.2f} MB")
    typer.echo(
        f"{found['integer_products']} of {record['quantized_products']} quantized products run in integer in "
        f"{record['versions']['runtime']}"
    )
    for name, compared in found["agreement"].items():
        typer.echo(
            f"same top-1 as the run on {compared['same_top1']} of {compared['images']} images ({name}); the run "
            f"itself with last bits disturbed: {compared['same_top1_of_the_run_with_itself']:g}"
        )


def _export(
    run: Path,
    format: str,
    processor: str,
    out: Path | None,
    calib: Path | None,
    further: Path | None,
    size: int,
    progress: Any,
) -> dict[str, Any]:
    from fimaq.errors import InputError
    from fimaq.export.formats import find_format

    kind = find_format(format)
    kind.require()
    from fimaq.artifact.run_directory import RunDirectory
    from fimaq.cli.classifier import images_for
    from fimaq.export.deliver import export_run, find_target

    directory = RunDirectory.open_existing(run)
    target = find_target(directory, kind, processor, out)
    config = directory.config
    if config.get("preprocessing") is None:
        raise InputError(f"{run} was made without image preprocessing; export it in Python")
    given = calib or (Path(config["given"]["calib"]) if config["given"].get("calib") else None)
    folders = {"calibration": given, "verify": further}
    images = {}
    for name, folder in folders.items():
        if folder is None or (name == "calibration" and calib is None and not folder.is_dir()):
            continue
        images[name] = images_for(config, folder, size, progress)
    if not images:
        raise InputError(
            f"the run's calibration images ({given}) are not there to verify on; give --calib or --verify DIR"
        )
    return export_run(run, images, target, progress=progress, format=format, processor=processor)
