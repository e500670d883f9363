"""A run's report, in Python: what `fimaq report` does, for models and images that are already at hand."""

import os
from pathlib import Path

import torch
from torch import Tensor, nn

from fimaq.artifact.files import write_bytes
from fimaq.data.inputs import tensor_fingerprint
from fimaq.device import choose_device
from fimaq.errors import InputError
from fimaq.loading import load
from fimaq.progress import Silent
from fimaq.report.material import Material, measure, read_run
from fimaq.report.page import page

REPORT = "report.html"
IMAGES = 64
"""Images that units and layers are measured on."""


def write_report(
    run: str | Path,
    out: str | Path | None = None,
    *,
    model: nn.Module | None = None,
    images: Tensor | None = None,
    fisher: Path | None = None,
    device: str = "auto",
    progress: Silent | None = None,
) -> Path:
    """Write RUN/report.html, or `out`. With the full-precision `model` and `images`, units are measured.

    `images` (n, C, H, W), n at least 2, are normalised as the model takes them; IMAGES of them are enough.
    """
    path = Path(run)
    target = report_file(path, None if out is None else Path(out))
    material = read_run(path, fisher)
    if model is None or images is None:
        absent = "the full-precision model was" if model is None else "images were"
        material.missing = f"{absent} not given"
    else:
        check_weights(material, model, "the model given")
        chosen = choose_device(device)
        material.images_from = "images given in Python"
        measure(material, model, load(path, model, str(chosen)), images, chosen, progress or Silent())
    store(material, target)
    return target


def report_file(run: Path, out: Path | None) -> Path:
    """Where the report goes, checked before any work is done."""
    target = out or run / REPORT
    if target.exists() and not target.is_file():
        raise InputError(f"{target} cannot be written: it is not a regular file; give --out a file")
    folder = _place(target).parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(f"{target} cannot be written: give --out a file in a folder that exists and is writable")
    return target


def _place(target: Path) -> Path:
    """The file itself, where `target` is a link to it: the link stays."""
    return Path(os.path.realpath(target))


def check_weights(material: Material, model: nn.Module, what: str) -> None:
    """Refuse a full-precision model that the run was not made from."""
    with torch.no_grad():
        own = tensor_fingerprint(sorted(model.state_dict().items()))
    if own != material.config["model"]["weights"]:
        raise InputError(f"the weights of {what} are not those the run was made from")


def store(material: Material, target: Path) -> int:
    """Write the page, whole or not at all; returns its size in bytes."""
    content = page(material).encode("utf-8")
    write_bytes(_place(target), content)
    return len(content)
