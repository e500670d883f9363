"""fimaq bench RUN"""

from pathlib import Path
from typing import Annotated, Any

import typer

from fimaq.cli import options


def bench(
    run: Annotated[Path, typer.Argument(help="A run directory that was exported.")],
    threads: Annotated[int, typer.Option(min=1, help="Threads of the runtime.")] = 2,
    repeats: Annotated[int, typer.Option(min=4, help="Timed turns for each batch size.")] = 20,
    as_json: options.AsJson = False,
) -> None:
    """Latency, throughput, size and memory: full precision beside quantized, taking turns in one process.

    Example: `fimaq bench runs/deit-tiny --threads 2`
    """
    from fimaq.export.bench import bench_run
    from fimaq.progress import for_terminal

    with for_terminal() as progress:
        result = bench_run(run, threads, repeats, progress)
    if as_json:
        options.print_json(result)
    else:
        _print_table(result)


def _print_table(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None)
    for column in ("", "full precision", "quantized", "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    for found in result["runtimes"].values():
        table.add_row(found["version"], "", "", "")
        for row in found["times"]:
            cells = []
            for name in ("full_precision", "quantized"):
                low, high = row[name]["quartiles_ms"]
                cells.append(f"{row[name]['median_ms']:.1f} ms ({low:.1f} to {high:.1f})")
            table.add_row(f"  batch {row['batch']}", *cells, _times(row["speedup"], "faster", "slower"))
        for name, key in (("  file", "bytes"), ("  peak memory, batch 16", "peak_memory_bytes")):
            if found[key]:
                full, quantized = (found[key][which] / 1e6 for which in ("full_precision", "quantized"))
                table.add_row(
                    name, f"{full:.1f} MB", f"{quantized:.1f} MB", _times(full / quantized, "smaller", "larger")
                )
    console = Console(highlight=False)
    console.print(table)
    console.print(f"{result['threads']} threads; median and quartiles")


def _times(ratio: float, more: str, less: str) -> str:
    return f"{ratio:.2f}x {more}" if ratio >= 1 else f"{1 / ratio:.2f}x {less}"
