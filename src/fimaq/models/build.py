"""Building a model from its timm name and loading weights into it, safely."""

import difflib
import pickle
import struct
import warnings
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fimaq.errors import InputError

RESERVED = {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"}
"""Arguments of timm.create_model by which a run's config.json could have files loaded, pickles among them."""


def build_model(
    name: str, weights: Path | None = None, num_classes: int | None = None, args: dict[str, Any] | None = None
) -> nn.Module:
    """A timm model in evaluation mode; without a weights file, with timm's pretrained weights."""
    if weights is not None and not weights.is_file():
        raise InputError(f"weights file {weights} does not exist")
    model = build_architecture(name, num_classes, args, pretrained=weights is None)
    if weights is not None:
        load_weights(model, weights)
    return model


def build_architecture(
    name: str, num_classes: int | None = None, args: dict[str, Any] | None = None, pretrained: bool = False
) -> nn.Module:
    """As `build_model`, with timm's pretrained weights or none."""
    options = dict(args or {})
    if reserved := sorted(RESERVED & options.keys()):
        raise InputError(f"model argument {reserved[0]!r} is not taken: it would make timm read other files")
    if num_classes is not None:
        options["num_classes"] = num_classes
    if not timm.is_model(name.split(".")[0].removeprefix("hf-hub:")) and not name.startswith("hf-hub:"):
        near = difflib.get_close_matches(name, timm.list_models(), 5)
        hint = f"; similar names: {', '.join(near)}" if near else ""
        raise InputError(f"{name!r} is not a timm model{hint}. `fimaq list models` shows the supported ones")
    try:
        model: nn.Module = timm.create_model(name, pretrained=pretrained, **options)
    except (TypeError, ValueError, AssertionError, LookupError, ArithmeticError, AttributeError) as error:
        raise InputError(f"timm cannot build {name!r} with {options}: {error}") from None
    except (OSError, RuntimeError) as error:
        if not pretrained:
            raise InputError(f"timm cannot build {name!r} with {options}: {error}") from None
        raise InputError(
            f"pretrained weights of {name!r} cannot be had ({_first_line(error)}); give --weights FILE"
        ) from None
    return model.eval()


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a safetensors file or a plain torch state dict; every key and shape must fit."""
    state = read_state_dict(path)
    own = model.state_dict()
    missing = sorted(own.keys() - state.keys())
    unknown = sorted(state.keys() - own.keys())
    shapes = [
        f"{key} is {tuple(state[key].shape)} in the file and {tuple(own[key].shape)} in the model"
        for key in sorted(own.keys() & state.keys())
        if own[key].shape != state[key].shape
    ]
    if missing or unknown or shapes:
        parts = [
            _few("missing in the file", missing),
            _few("not in the model", unknown),
            _few("shapes", shapes),
        ]
        raise InputError(
            f"weights file {path} does not fit the model: {'; '.join(p for p in parts if p)}. "
            "Is it of another architecture, or are --model-arg or --num-classes needed?"
        )
    model.load_state_dict({key: value.to(own[key].dtype) for key, value in state.items()})
    check_finite(model)


def check_finite(model: nn.Module) -> None:
    """Refuse weights that hold NaN or Inf: no range can be found for them."""
    bad = [k for k, v in model.state_dict().items() if v.is_floating_point() and not v.isfinite().all()]
    if bad:
        raise InputError(f"the model's weights hold NaN or Inf: {_few('in', bad)}")


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Tensors of a checkpoint file. Nothing in it is executed."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (
        SafetensorError,
        pickle.UnpicklingError,
        RuntimeError,
        EOFError,
        OSError,
        ValueError,
        KeyError,
        IndexError,
        struct.error,
    ) as error:
        raise InputError(
            f"weights file {path} is not a safetensors file or a plain torch state dict "
            f"({type(error).__name__}); nothing in it was executed"
        ) from None
    for key in ("state_dict", "model", "model_ema"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    if not isinstance(content, dict) or not all(
        isinstance(k, str) and isinstance(v, Tensor) for k, v in content.items()
    ):
        raise InputError(f"weights file {path} holds {type(content).__name__}, not a plain state dict of tensors")
    for name, tensor in content.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise InputError(
                f"weights file {path}: {name} is a sparse, quantized or empty tensor, not a plain one"
            )
    return content


def _few(label: str, names: list[str], count: int = 4) -> str:
    if not names:
        return ""
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return f"{label}: {', '.join(names[:count])}{more}"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
