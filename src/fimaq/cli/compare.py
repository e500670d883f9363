"""fimaq compare SUITE --data DIR --out DIR"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fimaq.cli import options
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
    calib: options.Calib = None,
    val: options.Val = None,
    preset: options.Preset = None,
    iters: options.Iters = None,
    calib_size: options.CalibSize = None,
    val_size: options.ValSize = None,
    batch_size: options.BatchSize = None,
    crop_pct: options.CropPct = None,
    class_map: options.ClassMap = None,
    device: options.Device = None,
    precision: options.Precision = None,
    memory_budget: options.MemoryBudget = None,
    host_budget: options.HostBudget = None,
    at_once: Annotated[
        int, typer.Option(min=1, help="Cells to run at the same time, each in a process of this machine.")
    ] = 1,
    ray: Annotated[bool, typer.Option("--ray", help="Run cells side by side with Ray, on this machine.")] = False,
    ray_address: Annotated[
        str | None, typer.Option(help="The same on a running Ray cluster: HOST:PORT, or auto for the one here.")
    ] = None,
    per_gpu: Annotated[int, typer.Option(min=1, help="Ray: cells that share a GPU.")] = 1,
    cpus_per_cell: Annotated[int, typer.Option(min=1, help="Ray: cores, and threads, of one cell.")] = 1,
    as_json: options.AsJson = False,
) -> None:
    """Quantize a grid of models, bits, methods and seeds, and write one table of them all.

    Finished runs are kept: the same command again goes on where it stopped. Flags win over the suite,
    the suite over the defaults.

    Example: `fimaq compare paper-loss --data imagenet --out runs/loss --quick`
    """
    from fimaq.checks import check_name
    from fimaq.cli.detection import USUAL
    from fimaq.cli.values import folder_settings
    from fimaq.compare.processes import in_processes
    from fimaq.compare.ray_tasks import RayUse, on_ray, require_ray
    from fimaq.compare.runner import one_by_one, run_suite
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
    with_ray = ray or ray_address is not None
    _check_spread(with_ray, at_once, per_gpu, cpus_per_cell)
    if with_ray:
        require_ray(ray_address)
    check_name(out)
    _check_cells([cell.config for cell in cells], with_ray)
    if with_ray:
        work = on_ray(_run, RayUse(ray_address, per_gpu, cpus_per_cell))
    else:
        work = in_processes(_run, at_once) if at_once > 1 else one_by_one(_run)
    with for_terminal() as progress:
        report = run_suite(wanted, cells, out, work, progress)
    if as_json:
        options.print_json({"out": out, **report})
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
    from fimaq.ranks import ALONE

    if config.task == "detection":
        return run_detection(config, out, resume, progress)
    return run_classification(config, out, resume, progress, ALONE)


def _check_spread(with_ray: bool, at_once: int, per_gpu: int, cpus_per_cell: int) -> None:
    """Refuse options that would be ignored with Ray, or without."""
    from fimaq.errors import InputError

    if with_ray and at_once > 1:
        raise InputError(f"--at-once {at_once} is for runs without Ray, which spreads cells by itself")
    for flag, value in {"--per-gpu": per_gpu, "--cpus-per-cell": cpus_per_cell}.items():
        if value > 1 and not with_ray:
            raise InputError(f"{flag} {value} is for runs with Ray: add --ray or --ray-address, or leave it out")


def _check_cells(configs: Sequence[Config], with_ray: bool) -> None:
    """Mistakes that would make every run of a model fail, found before the first one starts.

    With Ray a GPU may be anywhere in the cluster, so that this machine need not have one.
    """
    import timm

    from fimaq.artifact.scalars import require_tensorboard
    from fimaq.detection.build import DETECTORS
    from fimaq.device import choose_device
    from fimaq.errors import InputError

    if any(config.tensorboard for config in configs):
        require_tensorboard()
    for config in configs:
        if not (with_ray and config.device.startswith("cuda")):
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
