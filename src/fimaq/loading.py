"""The quantized model of a finished run, built again from its files."""

import copy
import json
from pathlib import Path

from torch import nn

from fimaq.artifact.model_file import load_quantized_state
from fimaq.artifact.run_directory import MODEL, RunDirectory
from fimaq.description import FORMAT
from fimaq.detection.build import build_folded_detector
from fimaq.errors import InputError
from fimaq.models.bounded import ValueLimit
from fimaq.models.build import build_architecture
from fimaq.models.prepare import Structure, apply_structure
from fimaq.version import __version__


def load(path: str | Path, model: nn.Module | None = None, device: str = "cpu") -> nn.Module:
    """The quantized model of a finished run, without its original weights. Executes nothing from the files.

    `model` gives the architecture (its weights are not read) where the run does not know a timm name for it.
    """
    directory = RunDirectory.open_existing(Path(path))
    if directory.config.get("format") != FORMAT:
        raise InputError(
            f"{path} has run format {directory.config.get('format')!r}; this fimaq {__version__} reads {FORMAT}"
        )
    missing = [key for key in ("model", "preprocessing", "given") if key not in directory.config]
    if missing:
        raise InputError(f"{path}/config.json is damaged: it has no {missing[0]!r}")
    tensors, metadata = directory.read_model()
    try:
        structure = Structure.from_dict(json.loads(metadata["structure"]))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{path}/{MODEL} is damaged: its structure cannot be read ({error})") from None
    model = getattr(model, "_orig_mod", model)  # what torch.compile was given
    fresh = _described_model(directory) if model is None else copy.deepcopy(model)
    try:
        apply_structure(fresh, structure)
    except KeyError as error:
        raise InputError(f"{path} was made from another architecture: the model has no layer {error}") from None
    except (AttributeError, AssertionError, TypeError, ValueError) as error:
        raise InputError(f"{path} was made from another architecture: {error}") from None
    load_quantized_state(fresh, tensors)
    return fresh.to(device).eval().requires_grad_(False)


def _described_model(directory: RunDirectory) -> nn.Module:
    """The architecture that a run's config.json describes, with weights that mean nothing."""
    described, where = directory.config["model"], f"{directory.path}/config.json"
    name, classes, args = (described.get(key) for key in ("name", "num_classes", "args"))
    if name is None:
        raise InputError(
            f"{directory.path} was made from a model object timm cannot build; give load(path, model=...)"
        )
    # bool is an int to Python, but no number of classes.
    number = classes is None or (isinstance(classes, int) and not isinstance(classes, bool) and classes >= 0)
    if not isinstance(name, str) or not isinstance(args, dict) or not number:
        raise InputError(f"{where} is damaged: its 'model' is {described!r:.200}")
    with ValueLimit((directory.path / MODEL).stat().st_size, where):
        if directory.task == "detection":
            return build_folded_detector(name, classes, args)
        return build_architecture(name, classes, args)
