"""What config.json says of a run: all that is needed to repeat it and to recognise it again."""

import platform
from typing import Any

import timm
import torch
from torch import Tensor, nn

from fimaq.config import Config
from fimaq.data.detection_image import DetectionPreprocessing
from fimaq.data.inputs import tensor_fingerprint
from fimaq.data.preprocess import Preprocessing
from fimaq.errors import InputError
from fimaq.models.build import build_architecture
from fimaq.version import __version__

FORMAT = 2
SAME = ("format", "settings", "model", "data", "preprocessing")
"""Sections that a run has to share with what it continues."""
NOT_COMPARED = {
    "calib",
    "val",
    "val_size",
    "class_map",
    "weights",
    "crop_pct",
    "device",
    "memory_budget",
    "host_budget",
    "tensorboard",
    "parts",
}
"""Settings not compared on resume: what only evaluation reads; those whose effect is compared instead (contents
behind paths, the resolved preprocessing); the memory budgets, to be changed by who ran out of memory; what is only
shown; the parts of a batch, which may be resumed with another number of processes."""


def describe(
    model: nn.Module,
    config: Config,
    preprocessing: Preprocessing | DetectionPreprocessing | None,
    fingerprint: str,
    images: int,
) -> dict[str, Any]:
    """What config.json records: all that is needed to repeat the run and to recognise it again."""
    settings = config.resolved()
    paths = {key: settings.pop(key) for key in sorted(NOT_COMPARED)}
    for key in ("model", "model_args", "num_classes"):
        settings.pop(key)
    return {
        "format": FORMAT,
        "settings": settings,
        "model": {
            "name": config.model,
            "args": config.model_args,
            "num_classes": config.num_classes or getattr(model, "num_classes", None),
            "weights": tensor_fingerprint(sorted(model.state_dict().items())),
        },
        "data": {"images": images, "fingerprint": fingerprint},
        "preprocessing": preprocessing.as_dict() if preprocessing else None,
        "given": paths,
        "versions": {
            "fimaq": __version__,
            "torch": torch.__version__,
            "timm": timm.__version__,
            "python": platform.python_version(),
        },
    }


def architecture_of(model: nn.Module, args: dict[str, Any], example: Tensor) -> str | None:
    """The timm name that builds a model with this one's weights, if there is one."""
    name = (getattr(model, "pretrained_cfg", None) or {}).get("architecture")
    if not name:
        return None
    try:
        with torch.random.fork_rng(devices=[]):
            twin = build_architecture(name, getattr(model, "num_classes", None), args)
    except InputError:
        return None
    shapes = [{k: v.shape for k, v in m.state_dict().items()} for m in (model, twin)]
    if shapes[0] != shapes[1]:
        return None
    twin.load_state_dict(model.state_dict())
    training = [module for module in model.modules() if module.training]
    try:
        with torch.no_grad():
            same = torch.allclose(_output(model.eval(), example), _output(twin, example), rtol=1e-4, atol=1e-5)
        return name if same else None
    except (RuntimeError, AssertionError, IndexError, ValueError, TypeError):
        return None  # it does not take these images; who runs it says so
    finally:
        for module in training:
            module.training = True


def _output(model: nn.Module, example: Tensor) -> Tensor:
    """Of a model, wherever it is, on the CPU."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    return model(example.to(device)).cpu()  # type: ignore[no-any-return]
