"""Published weights into a Detector: MMDetection's, and those of Swin-Transformer-Object-Detection.

Neck and heads are named alike in all three. The backbone's names are those of Swin-Transformer-Object-Detection;
MMDetection has names of its own for it, and another order of channels where four patches are merged into one.
"""

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from fimaq.detection.detector import Detector
from fimaq.errors import InputError
from fimaq.models.build import check_finite, read_state_dict

_DROPPED_PREFIXES = ("data_preprocessor.", "ema_")
_DROPPED_SUFFIXES = (".relative_position_index", ".attn_mask")  # follow from sizes, not learned
_RENAMED = (
    (r"^backbone\.patch_embed\.projection\.", "backbone.patch_embed.proj."),
    (r"^backbone\.stages\.", "backbone.layers."),
    (r"\.attn\.w_msa\.", ".attn."),
    (r"\.ffn\.layers\.0\.0\.", ".mlp.fc1."),
    (r"\.ffn\.layers\.1\.", ".mlp.fc2."),
)
_MERGED_BY_UNFOLD = re.compile(r"^backbone\.stages\.\d+\.downsample\.(norm|reduction)\.")


def convert_checkpoint(state: dict[str, Any]) -> dict[str, Tensor]:
    """Weights by the names of a Detector. A Detector's own state dict comes out as it went in."""
    if isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    converted: dict[str, Tensor] = {}
    for key, value in state.items():
        key = key.removeprefix("module.")
        if key.startswith(_DROPPED_PREFIXES) or key.endswith(_DROPPED_SUFFIXES):
            continue
        if _MERGED_BY_UNFOLD.match(key):
            value = _from_unfold_order(key, value)
        for pattern, replacement in _RENAMED:
            key = re.sub(pattern, replacement, key)
        converted[key] = value
    return converted


def load_checkpoint(detector: Detector, path: Path) -> None:
    """Load a published checkpoint; every key and shape must fit. Nothing in the file is executed."""
    if not path.is_file():
        raise InputError(f"weights file {path} does not exist")
    try:
        stored = read_state_dict(path)
    except InputError as error:
        raise InputError(
            f"{error}. A checkpoint of MMDetection may hold objects beside its weights. If you trust the file, "
            "save the weights alone: python -c \"import torch; torch.save(torch.load('FILE', map_location='cpu', "
            "weights_only=False)['state_dict'], 'WEIGHTS.pth')\""
        ) from None
    state, own = convert_checkpoint(stored), detector.state_dict()
    misfits = {
        "missing in the file": sorted(own.keys() - state.keys()),
        "not in the detector": sorted(state.keys() - own.keys()),
        "of another shape": [
            f"{key} ({tuple(state[key].shape)} in the file, {tuple(own[key].shape)} in the detector)"
            for key in sorted(own.keys() & state.keys())
            if own[key].shape != state[key].shape
        ],
    }
    if any(misfits.values()):
        listed = "; ".join(f"{what}: {_few(names)}" for what, names in misfits.items() if names)
        raise InputError(
            f"weights file {path} does not fit the detector: {listed}. "
            "Is it of another detector, or are other arguments or another number of classes needed?"
        )
    detector.load_state_dict({key: value.to(own[key].dtype) for key, value in state.items()})
    check_finite(detector)


def _from_unfold_order(key: str, value: Tensor) -> Tensor:
    """Merged channels (..., 4 * dim): from nn.Unfold's order channel, row, column to column, row, channel."""
    try:
        separate = value.unflatten(-1, (-1, 2, 2))
    except (RuntimeError, IndexError):
        raise InputError(
            f"weights {key!r} are of shape {tuple(value.shape)}: expected (..., 4 * dim), channels of four patches"
        ) from None
    return separate.transpose(-1, -3).flatten(-3)


def _few(names: list[str], count: int = 4) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more
