"""The `fimaq` command run by tests, in this process or its own, and one tiny model with a few images for it."""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from fimaq import cli

MODEL = "vit_tiny_patch16_224"
ARGUMENTS = {"img_size": 32, "depth": 2, "embed_dim": 24, "num_heads": 2}
CLASSES = 4
COLOURS = ((220, 30, 30), (30, 200, 40), (40, 60, 210), (200, 190, 40))
PATIENCE = 60.0
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Outcome:
    code: Any
    out: str
    err: str


def fimaq(*arguments: str | Path) -> Outcome:
    """The command in this process; an exception that escapes it (a traceback to the user) escapes here too."""
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["fimaq", *map(str, arguments)])
        patch.setattr(cli.app, "registered_commands", [])  # main() registers them each time
        patch.setenv("COLUMNS", "200")
        patch.setenv("HF_HUB_OFFLINE", "1")
        try:
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
    return Outcome(code, out.getvalue(), err.getvalue())


def fimaq_process(*arguments: str | Path) -> Outcome:
    """The command as its own process."""
    command = [sys.executable, "-m", "fimaq", *map(str, arguments)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    return Outcome(done.returncode, done.stdout, done.stderr)


def write_image(path: Path, colour: tuple[int, int, int], generator: np.random.Generator) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.asarray(colour) + generator.integers(-30, 31, (32, 32, 3))
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=95)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:150])


def tiny_model() -> torch.nn.Module:
    """Weights of visible size, so that different images get different classes."""
    with torch.random.fork_rng():
        torch.manual_seed(3)  # the patch embedding's bias is drawn when it is built
        model = timm.create_model(MODEL, num_classes=CLASSES, **ARGUMENTS).eval()
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


@dataclass(frozen=True)
class World:
    """Paths that every test reads and none writes."""

    weights: Path
    data: Path
    """train/ with 10 images and val/0 ... val/3 with 3 images each."""

    def quantize(self, out: Path, *more: str | Path, **changed: Any) -> list[str | Path]:
        """Arguments of a quick run. `changed`: another value for an option, None to leave it out."""
        options: dict[str, Any] = {
            "weights": self.weights,
            "data": self.data,
            "num_classes": CLASSES,
            "iters": 3,
            "calib_size": 8,
            "batch_size": 4,
            "device": "cpu",
            "out": out,
            **changed,
        }
        line: list[str | Path] = ["quantize", MODEL]
        for name, value in options.items():
            if value is not None:
                line += [f"--{name.replace('_', '-')}", str(value)]
        for name, value in ARGUMENTS.items():
            line += ["--model-arg", f"{name}={value}"]
        return [*line, *more]


def make_world(folder: Path) -> World:
    """The tiny model's weights and its images, written into `folder`."""
    save_file(tiny_model().state_dict(), folder / "tiny.safetensors")
    generator = np.random.default_rng(0)
    for number in range(10):
        write_image(folder / "data" / "train" / f"{number:02d}.jpg", COLOURS[number % 4], generator)
    for label in range(CLASSES):
        for number in range(3):
            write_image(folder / "data" / "val" / str(label) / f"{number}.jpg", COLOURS[label], generator)
    return World(folder / "tiny.safetensors", folder / "data")


def assert_refused(outcome: Outcome, *named: str) -> None:
    """Exit 2 and one line that says why, the last; what stands before it are notes on the work."""
    assert outcome.code == 2, outcome
    lines = outcome.err.splitlines()
    assert [line for line in lines if line.startswith("fimaq:")] == lines[-1:], outcome.err
    assert "Traceback" not in outcome.err
    assert outcome.out == ""
    for text in named:
        assert text in lines[-1]


def assert_same_model(one: Path, two: Path) -> None:
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()


def evaluate(run: Path, *arguments: str | Path) -> dict[str, Any]:
    outcome = fimaq("evaluate", run, "--device", "cpu", "--json", *arguments)
    assert outcome.code == 0, outcome.err
    result: dict[str, Any] = json.loads(outcome.out)
    return result


def run_to_evaluate(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")
