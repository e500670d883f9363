"""Options that several commands have, so that they are spelt and explained once, and what --json prints."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fimaq.config import Config


def default_of(name: str) -> str:
    """How help shows the default of a setting."""
    return f"[default: {Config.model_fields[name].default}]"


Calib = Annotated[Path | None, typer.Option(help="Calibration images; no labels needed.")]
Val = Annotated[Path | None, typer.Option(help="Validation images, one folder per class.")]
Weights = Annotated[
    Path | None, typer.Option(help="safetensors or plain state dict; without it timm's pretrained weights.")
]
Bits = Annotated[str | None, typer.Option(help=f"wXaY, X and Y from 2 to 8. {default_of('bits')}")]
Preset = Annotated[
    str | None,
    typer.Option(help=f"deploy: per-tensor scales; released: per token and head. {default_of('preset')}"),
]
Iters = Annotated[int | None, typer.Option(help=f"Iterations per unit. {default_of('iters')}")]
Alpha = Annotated[float | None, typer.Option(help=f"Share of the low-rank term. {default_of('alpha')}")]
Damping = Annotated[
    float | None, typer.Option(help="Share of the plain squared error in the loss. [default: 0; detection: 0.5]")
]
CalibSize = Annotated[int | None, typer.Option(help="Calibration images. [default: 1024; detection: 256]")]
ValSize = Annotated[
    int | None,
    typer.Option(help="Validation images at the end. [default: all; of a classifier on a CPU: 500]"),
]
BatchSize = Annotated[
    int | None,
    typer.Option(help="Images in a reconstruction step. [default: 32, or all if they are fewer; detection: 4]"),
]
CropPct = Annotated[float | None, typer.Option(help="Overrides the model's own; 1.0: no crop.")]
ModelArg = Annotated[
    list[str] | None, typer.Option(help="key=value for timm.create_model, repeatable; tuples as 3,6,12.")
]
NumClasses = Annotated[int | None, typer.Option(help="Classes of the model's head.")]
ClassMap = Annotated[
    Path | None, typer.Option(help='JSON {"folder": index} where folders are not ImageNet wnids.')
]
Device = Annotated[str | None, typer.Option(help=f"auto, cpu or cuda. {default_of('device')}")]
Precision = Annotated[
    str | None,
    typer.Option(help="Of products on a GPU: fp32, tf32 or bf16. [default: bf16; detection: tf32]"),
]
MemoryBudget = Annotated[
    str | None, typer.Option(help="GPU memory to stay within, such as 4GiB. [default: no limit]")
]
HostBudget = Annotated[
    str | None,
    typer.Option(help="Host memory beside a GPU, such as 20GiB: activations that do not fit go to disk."),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]


def print_json(obj: Any) -> None:
    """One object on one line of standard output. JSON knows no NaN: numbers that are not finite become null."""
    from fimaq.artifact.files import json_ready

    print(json.dumps(json_ready(obj), allow_nan=False))
