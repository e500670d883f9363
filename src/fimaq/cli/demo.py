"""fimaq demo"""

import time
from typing import Annotated

import typer

CALIBRATION_IMAGES = 256
ITERATIONS = 200
METHODS = ("rtn", "qdrop", "fima-q")


def demo(
    seed: Annotated[int, typer.Option(min=0, help="Another seed, another run.")] = 0,
) -> None:
    """Quantize an embedded digit-reading ViT to 3 bits with three methods; no data or network needed."""
    from rich.console import Console
    from rich.table import Table

    from fimaq.accuracy import fidelity
    from fimaq.data.demo import demo_calibration, demo_model, demo_test
    from fimaq.pipeline import quantize
    from fimaq.progress import for_terminal

    model = demo_model()
    images, labels = demo_test()
    table = Table(title="A small ViT that reads digits, in 3 bits (W3A3)", box=None)
    for column in ("method", "top-1 %", "KL to full precision", "seconds"):
        table.add_column(column, justify="left" if column == "method" else "right")
    with for_terminal() as progress:
        teacher = model(images).detach()
        right = (teacher.argmax(1) == labels).float().mean() * 100
        table.add_row("full precision", f"{right:.2f}", "0", "")
        for method in METHODS:
            progress.note(f"{method} ...")
            began = time.monotonic()
            run = quantize(
                model,
                demo_calibration(CALIBRATION_IMAGES),
                bits="w3a3",
                method=method,
                iters=ITERATIONS,
                seed=seed,
                device="cpu",
                progress=progress,
            )
            result = fidelity(run.model, iter([(images, teacher)]))
            right = (run.model(images).argmax(1) == labels).float().mean() * 100
            table.add_row(
                method, f"{right:.2f}", f"{result['kl_divergence']:.4f}", f"{time.monotonic() - began:.0f}"
            )
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"on {len(labels)} test images the model was not trained or calibrated on; its LayerNorms were started "
        "uneven, so that 3 bits hurt it as they hurt large ViTs"
    )
