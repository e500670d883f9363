"""Everything a report is made from, read from a run directory and measured on its models."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fimaq.artifact.files import file_digest, read_json
from fimaq.artifact.run_directory import MODEL, RunDirectory
from fimaq.config import Config
from fimaq.data.preprocess import Preprocessing
from fimaq.device import numerics
from fimaq.errors import FimaqError, InputError
from fimaq.export.bench import BENCH
from fimaq.export.formats import FORMATS
from fimaq.models.prepare import Structure
from fimaq.progress import Silent
from fimaq.report.disagreements import Disagreements
from fimaq.report.reading import mapping
from fimaq.report.sensitivity import Sensitivity, measure_sensitivity
from fimaq.report.twin import full_precision_twin


@dataclass
class Material:
    """What sections are written from. What is not there is None, and `missing` says why, for people."""

    path: Path
    config: dict[str, Any]
    metrics: dict[str, Any]
    task: str
    digest: str
    bench: dict[str, Any] | None = None
    exports: list[dict[str, Any]] = field(default_factory=list)
    stayed_float: list[str] = field(default_factory=list)
    divided: dict[str, dict[int, int]] = field(default_factory=dict)
    sensitivity: Sensitivity | None = None
    disagreements: Disagreements | None = None
    disagreements_on: str = ""
    images_from: str = ""
    class_names: dict[int, str] = field(default_factory=dict)
    fisher: list[Path] = field(default_factory=list)
    missing: str = ""


def read_run(run: Path, fisher: Path | None = None) -> Material:
    """What the run directory itself holds. `fisher`: a folder of `fimaq fisher`; else RUN/fisher, if there."""
    directory = RunDirectory.open_existing(run)
    structure = structure_of(directory)
    return Material(
        run,
        directory.config,
        directory.read_metrics(),
        directory.task,
        file_digest(run / MODEL),
        bench=_optional(run / BENCH),
        exports=[found for kind in FORMATS.values() if (found := _optional(run / kind.record))],
        stayed_float=structure.stayed_float,
        divided=structure.divided,
        fisher=fisher_folders(run, fisher),
    )


def structure_of(directory: RunDirectory) -> Structure:
    return Structure.from_dict(json.loads(directory.read_model()[1]["structure"]))


def fisher_folders(run: Path, given: Path | None) -> list[Path]:
    """Folders that `fimaq fisher` wrote: the one given, or RUN/fisher and the folders inside it."""
    folder = given or run / "fisher"
    candidates = [folder, *sorted(p for p in folder.iterdir() if p.is_dir())] if folder.is_dir() else []
    found = [path for path in candidates if (path / "fisher.json").is_file() and (path / "fisher.png").is_file()]
    if given is not None and not found:
        raise InputError(
            f"{given} holds no fisher.json and fisher.png, the files that `fimaq fisher --out` writes"
        )
    return found


def measure(
    material: Material,
    original: nn.Module,
    quantized: nn.Module,
    images: Tensor,
    device: torch.device,
    progress: Silent,
) -> None:
    """Add sensitivity, noise and distributions, and disagreements where no labelled images gave them already.

    `images` (n, C, H, W): normalised as the models take them. Where the two models cannot be lined up, the report
    is written all the same, and says why.
    """
    structure = structure_of(RunDirectory.open_existing(material.path))
    stored = material.config.get("preprocessing")
    disagreements = Disagreements(Preprocessing.from_dict(stored) if stored else None)
    with numerics(Config.create(), device):
        original, quantized = original.to(device).eval(), quantized.to(device).eval()
        try:
            twin = full_precision_twin(original, quantized, structure, images[:1].to(device))
        except InputError:
            raise
        except FimaqError as error:
            material.missing = str(error)
            return
        material.sensitivity = measure_sensitivity(
            twin, quantized, structure, images, progress, None if material.disagreements else disagreements.add
        )
    if material.disagreements is None:
        material.disagreements, material.disagreements_on = disagreements, material.images_from


def _optional(path: Path) -> dict[str, Any] | None:
    return mapping(read_json(path)) or None if path.is_file() else None
