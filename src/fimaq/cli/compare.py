"""fimaq compare SUITE --data DIR --out DIR"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fimaq.config import Config


def compare(
    suite: Annotated[
        str, typer.Argument(help="YAML file, or paper-main, paper-loss, paper-rank, paper-samples, paper-time.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the tables and all run directories.")],
    data: Annotated[Path | None, typer.Option(help="Folder with train/ (calibration) and val/ inside.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The suite's small form, for a laptop.")] = False,
    weights_dir: Annotated[
        Path | None, typer.Option(help="Folder with one weights file per model, MODEL.safetensors or .pth.")
    ] = None,
    calib: Annotated[Path | None, typer.Option(help="Calibration images; no labels needed.")] = None,
    val: Annotated[Path | None, typer.Option(help="Validation images, one folder per class.")] = None,
    preset: Annotated[str | None, typer.Option(help="deploy or released.")] = None,
    iters: Annotated[int | None, typer.Option(help="Iterations per unit.")] = None,
    calib_size: Annotated[int | None, typer.Option(help="Calibration images.")] = None,
    val_size: Annotated[int | None, typer.Option(help="Validation images at the end.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images in a reconstruction step.")] = None,
    crop_pct: Annotated[float | None, typer.Option(help="Overrides the models' own; 1.0: no crop.")] = None,
    class_map: Annotated[
        Path | None, typer.Option(help='JSON {"folder": index} where folders are not ImageNet wnids.')
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, tf32 or bf16 (faster on a GPU).")] = None,
    memory_budget: Annotated[str | None, typer.Option(help="GPU memory to stay within, such as 4GiB.")] = None,
    host_budget: Annotated[str | None, typer.Option(help="Host memory for what does not fit on the GPU.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Quantize a grid of models, bits, methods and seeds, and write one table of them all.

    Finished runs are kept: the same command again goes on where it stopped. Flags win over the suite.

    Example: `fimaq compare paper-loss --data imagenet --out runs/loss --quick`
    """
    from fimaq.cli.detection import USUAL
    from fimaq.cli.values import folder_settings
    from fimaq.compare.runner import run_suite
    from fimaq.compare.suite import expand, read_suite
    from fimaq.errors import FimaqError
    from fimaq.progress import for_terminal

    given = {name: value for name, value in locals().items() if name in Config.model_fields and value is not None}
    wanted = read_suite(suite, quick)
    cells = expand(
        wanted,
        usual={"detection": USUAL},
        folders=folder_settings,
        data=data,
        given=given,
        weights_dir=weights_dir,
    )
    _check_cells([cell.config for cell in cells])
    with for_terminal() as progress:
        report = run_suite(wanted, cells, out, _run, progress)
    if as_json:
        json.dump({"out": str(out), **report}, sys.stdout)
        sys.stdout.write("\n")
    else:
        _print_summary(out, report)
    failed = [cell["name"] for cell in report["cells"] if cell["state"] == "failed"]
    if failed:
        raise FimaqError(
            f"{len(failed)} of {len(cells)} cells failed, such as {failed[0]}: see {out / 'table.md'}"
        )


def _run(config: Config, out: Path, resume: bool, progress: Any) -> dict[str, Any]:
    from fimaq.cli.detection import run_detection
    from fimaq.cli.quantize import run_classification

    run = run_detection if config.task == "detection" else run_classification
    return run(config, out, resume, progress)


def _check_cells(configs: Sequence[Config]) -> None:
    """Mistakes that would make every run of a model fail, found before the first one starts."""
    import timm

    from fimaq.detection.build import DETECTORS
    from fimaq.errors import InputError
    from fimaq.pipeline import choose_device

    for config in configs:
        choose_device(config.device)
        if config.calib is None:
            raise InputError(
                "no calibration images were given: use --data DIR (with train/ inside) or --calib DIR"
            )
        name = str(config.model)
        if config.task == "detection":
            known = name in DETECTORS
        else:
            known = name.startswith("hf-hub:") or timm.is_model(name.split(".")[0])
        if not known:
            raise InputError(
                f"{name!r} is neither in the suite's models nor a model by itself; `fimaq list models` shows them"
            )


def _print_summary(out: Path, report: dict[str, Any]) -> None:
    from rich.console import Console

    from fimaq.compare.summary import CellResult
    from fimaq.compare.tables import build_tables, markdown_lines, progress_line

    say = Console(highlight=False, soft_wrap=True, markup=False).print
    results = [CellResult(c["name"], c["labels"], c["measures"], c["error"]) for c in report["cells"]]
    first = build_tables(results, report["rows"], report["columns"], report["overview"])[0]
    say("\n".join(markdown_lines(first)))
    say(f"{progress_line(results)} {out / 'table.html'}, table.md, table.csv and compare.json hold the rest")
