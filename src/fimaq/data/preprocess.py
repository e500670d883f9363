"""From an image to a model's input: the evaluation transform of the model's own timm data config."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from torch import Tensor, nn

from fimaq.errors import InputError

Transform = Callable[[Image.Image], Tensor]
"""A PIL RGB image of any size -> float32 tensor (3, H, W), normalised."""

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
CROP_MODES = ("center", "squash", "border")
LARGEST_INPUT = 2**14
"""Pixels at an edge."""
PIXEL_SLACK = 0.25
"""How far bicubic resizing of tensors may leave the range of pixels, which is 0 to 1."""


@dataclass(frozen=True)
class Preprocessing:
    """How an image becomes a model's input; plain data, so that a run can write it down and repeat it.

    `mean` and `std` are per RGB channel, for pixel values in [0, 1]. `crop_pct` in (0, 1] is the share of the
    resized image's side that the crop keeps: 1.0 resizes straight to the input size.
    """

    input_size: tuple[int, int, int]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: str = "bicubic"
    crop_pct: float = 1.0
    crop_mode: str = "center"

    def __post_init__(self) -> None:
        if len(self.input_size) != 3 or self.input_size[0] != 3 or min(self.input_size) < 1:
            raise InputError(
                f"input_size {self.input_size} is not (3, height, width): only RGB models are supported"
            )
        if max(self.input_size) > LARGEST_INPUT:
            raise InputError(f"input_size {self.input_size} is larger than {LARGEST_INPUT}, the most that is read")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != 3:
                raise InputError(f"{name} {values} must hold 3 values, one per RGB channel")
        if min(self.std) <= 0:
            raise InputError(f"std {self.std} must be positive: pixels are divided by it")
        if not 0 < self.crop_pct <= 1:
            raise InputError(f"crop_pct {self.crop_pct} must be above 0 and at most 1")
        if self.interpolation not in INTERPOLATIONS:
            raise InputError(f"interpolation {self.interpolation!r} is unknown: use {', '.join(INTERPOLATIONS)}")
        if self.crop_mode not in CROP_MODES:
            raise InputError(f"crop_mode {self.crop_mode!r} is unknown: use {', '.join(CROP_MODES)}")

    def as_dict(self) -> dict[str, Any]:
        """The fields as JSON holds them (tuples as lists); `from_dict` reads them back."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Preprocessing":
        """The inverse of `as_dict`, from a file: whatever it could not have given is an InputError."""
        if not isinstance(values, Mapping):
            raise InputError(f"preprocessing is {values!r:.80}, not an object")
        known = {field.name for field in fields(cls)}
        if wrong := sorted(known.symmetric_difference(values)):
            raise InputError(f"preprocessing must have exactly the keys {sorted(known)}; check {', '.join(wrong)}")
        plain: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        for name, expected in (("input_size", int), ("mean", int | float), ("std", int | float)):
            if not isinstance(plain[name], tuple) or not all(_is_number(v, expected) for v in plain[name]):
                raise InputError(f"preprocessing: {name} is {plain[name]!r:.80}, not a list of numbers")
        if not _is_number(plain["crop_pct"], int | float):
            raise InputError(f"preprocessing: crop_pct is {plain['crop_pct']!r:.80}, not a number")
        return cls(**plain)

    def describe(self) -> str:
        """One line for a person, such as `3x224x224, bicubic, crop_pct 1.0, mean (...), std (...)`."""
        size = "x".join(str(length) for length in self.input_size)
        mode = "" if self.crop_mode == "center" else f" ({self.crop_mode})"
        mean, std = (f"({', '.join(f'{value:g}' for value in values)})" for values in (self.mean, self.std))
        return f"{size}, {self.interpolation}, crop_pct {self.crop_pct}{mode}, mean {mean}, std {std}"


def _is_number(value: Any, kind: Any) -> bool:
    """bool is an int to Python, but no number in a file."""
    return isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)


def resolve_preprocessing(
    model: nn.Module,
    *,
    input_size: Sequence[int] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    interpolation: str | None = None,
    crop_pct: float | None = None,
    crop_mode: str | None = None,
) -> Preprocessing:
    """What `model` was trained to see, according to its timm data config. Arguments that are given win.

    A module without a timm config gets timm's defaults: 3x224x224, bicubic, crop 0.875, ImageNet's mean.
    """
    config = resolve_model_data_config(model, args={"input_size": _built_input_size(model)})
    resolved = Preprocessing(
        input_size=tuple(config["input_size"]),
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        interpolation=config["interpolation"],
        crop_pct=config["crop_pct"],
        crop_mode=config["crop_mode"],
    )
    overrides = {
        "input_size": None if input_size is None else tuple(input_size),
        "mean": None if mean is None else tuple(mean),
        "std": None if std is None else tuple(std),
        "interpolation": interpolation,
        "crop_pct": crop_pct,
        "crop_mode": crop_mode,
    }
    given: dict[str, Any] = {name: value for name, value in overrides.items() if value is not None}
    return replace(resolved, **given)


def stated_preprocessing(
    model: nn.Module, images: Tensor, given: Mapping[str, Any] | None
) -> Preprocessing | None:
    """How `images` (n, C, H, W), which came preprocessed, are said to have been made.

    That is the model's own data config, but for what is `given`, which must be able to give such images. None for
    images that are not RGB.
    """
    size = tuple(images.shape[1:])
    if size[0] != 3 and given is None:
        return None
    if given is not None and not isinstance(given, Mapping):
        raise InputError(f"preprocessing is {given!r:.80}: give a dictionary, such as {{'crop_pct': 1.0}}")
    own = resolve_preprocessing(model, input_size=size)
    stated = Preprocessing.from_dict({**own.as_dict(), **(given or {})})
    if stated.input_size != size:
        raise InputError(f"preprocessing gives images of {stated.input_size}, and those given are {size}")
    if given is not None:
        _check_pixels(stated, images)
    return stated


def _check_pixels(preprocessing: Preprocessing, images: Tensor) -> None:
    """Refuse a mean and std that do not lead from images (n, 3, H, W) back to pixels between 0 and 1."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (preprocessing.mean, preprocessing.std))
    low = (images.amin(0).cpu() * std + mean).min().item()
    high = (images.amax(0).cpu() * std + mean).max().item()
    if low < -PIXEL_SLACK or high > 1 + PIXEL_SLACK:
        raise InputError(
            f"preprocessing: with mean {preprocessing.mean} and std {preprocessing.std} the images' pixels would "
            f"lie between {low:.2f} and {high:.2f} instead of 0 and 1"
        )


def build_transform(preprocessing: Preprocessing) -> Transform:
    """The evaluation transform: PIL RGB image of any size -> float32 (3, H, W), `(pixel / 255 - mean) / std`.

    With crop_pct 1.0 an image that already has the input size is not resampled.
    """
    transform = create_transform(
        input_size=preprocessing.input_size,
        is_training=False,
        mean=preprocessing.mean,
        std=preprocessing.std,
        interpolation=preprocessing.interpolation,
        crop_pct=preprocessing.crop_pct,
        crop_mode=preprocessing.crop_mode,
    )
    return cast(Transform, transform)


def _built_input_size(model: nn.Module) -> tuple[int, int, int] | None:
    """(channels, H, W) that the patch embedding was built for; None where the module does not say.

    timm's data config describes the published checkpoint: it still says 3x224x224 for a model created with
    `img_size=384` or `in_chans=1`. The patch embedding knows better.
    """
    patch_embed = getattr(model, "patch_embed", None)
    size = getattr(patch_embed, "img_size", None)
    if not isinstance(size, tuple) or len(size) != 2:
        return None
    channels = getattr(getattr(patch_embed, "proj", None), "in_channels", 3)
    return channels, size[0], size[1]
