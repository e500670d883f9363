"""Building a detector by name."""

import difflib
from typing import Any

from fimaq.detection.box_head import BOX_HEADS
from fimaq.detection.conv import fold_batch_norms
from fimaq.detection.detector import Detector
from fimaq.detection.fpn import FPN
from fimaq.detection.roi_heads import CascadeRoIHead, HeadShape, StandardRoIHead
from fimaq.detection.rpn import RPNHead
from fimaq.detection.swin import SwinBackbone
from fimaq.errors import InputError

_HEADS: dict[str, tuple[type[StandardRoIHead] | type[CascadeRoIHead], str]] = {
    "mask_rcnn": (StandardRoIHead, "shared2fc"),
    "cascade_mask_rcnn": (CascadeRoIHead, "4conv1fc"),
}
_DEPTHS = {"t": (2, 2, 6, 2), "s": (2, 2, 18, 2)}

DETECTORS = tuple(f"{family}_swin_{size}" for family in _HEADS for size in _DEPTHS)
ARGUMENTS: dict[str, Any] = {
    "embed_dim": 96,
    "depths": None,  # by name
    "num_heads": (3, 6, 12, 24),
    "window_size": 7,
    "channels": 256,  # of the feature pyramid and all heads on it
    "fc_channels": 1024,
    "box_head": None,  # by name
    "reg_class_agnostic": None,  # published cascades of 2 FCs share boxes between classes, those of 4 convs do not
}


def build_detector(name: str, num_classes: int = 80, args: dict[str, Any] | None = None) -> Detector:
    """A detector in evaluation mode with random weights; `args` replaces values of ARGUMENTS."""
    if name not in DETECTORS:
        near = difflib.get_close_matches(name, DETECTORS, 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise InputError(f"{name!r} is not a detector{hint}; there are {', '.join(DETECTORS)}")
    if num_classes < 1:
        raise InputError(f"a detector of {num_classes} classes cannot be built; give 1 or more")
    family, size = name.rsplit("_swin_", 1)
    roi_head_class, default_box_head = _HEADS[family]
    values = _checked({"depths": _DEPTHS[size], "box_head": default_box_head} | (args or {}))
    agnostic = values["reg_class_agnostic"]
    if agnostic is None:
        agnostic = roi_head_class is CascadeRoIHead and values["box_head"] == "shared2fc"
    channels = values["channels"]
    backbone = SwinBackbone(*(values[key] for key in ("embed_dim", "depths", "num_heads", "window_size")))
    roi_head = roi_head_class(
        HeadShape(values["box_head"], num_classes, channels, values["fc_channels"], agnostic)
    )
    return Detector(backbone, FPN(backbone.channels, channels), RPNHead(channels), roi_head).eval()


def build_folded_detector(name: str, num_classes: int, args: dict[str, Any]) -> Detector:
    """What a quantized detector is loaded into: normalisation is part of the convolutions already."""
    detector = build_detector(name, num_classes, args)
    fold_batch_norms(detector)
    return detector


def _checked(given: dict[str, Any]) -> dict[str, Any]:
    """All values of ARGUMENTS, with those given in place of the defaults."""
    unknown = sorted(given.keys() - ARGUMENTS.keys())
    if unknown:
        raise InputError(f"a detector has no argument {unknown[0]!r}; it has {', '.join(ARGUMENTS)}")
    values = ARGUMENTS | given
    for key in ("embed_dim", "window_size", "channels", "fc_channels"):
        if not _is_count(values[key]):
            raise InputError(f"{key} is {values[key]!r}; give a whole number from 1")
    for key in ("depths", "num_heads"):
        listed = isinstance(values[key], (list, tuple))
        if not listed or len(values[key]) != 4 or not all(_is_count(v) for v in values[key]):
            raise InputError(f"{key} is {values[key]!r}; give four whole numbers from 1, one per stage")
    uneven = [heads for i, heads in enumerate(values["num_heads"]) if values["embed_dim"] * 2**i % heads]
    if uneven:
        raise InputError(
            f"embed_dim {values['embed_dim']} cannot be divided between num_heads {values['num_heads']}: "
            f"{uneven[0]} heads leave a remainder at their stage"
        )
    if values["box_head"] not in BOX_HEADS:
        raise InputError(f"box_head is {values['box_head']!r}; give {' or '.join(BOX_HEADS)}")
    if not isinstance(values["reg_class_agnostic"], bool | None):
        raise InputError(f"reg_class_agnostic is {values['reg_class_agnostic']!r}; give true or false")
    return values


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
