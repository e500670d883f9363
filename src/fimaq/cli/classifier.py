"""The classifier that a command names, and how it wants its images."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fimaq.config import Config

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fimaq.data import Preprocessing


def open_classifier(config: Config, progress: Any) -> tuple["nn.Module", "Preprocessing"]:
    from fimaq.models.build import build_model

    assert config.model is not None
    model = build_model(config.model, config.weights, config.num_classes, config.model_args)
    preprocessing = preprocessing_of(model, config)
    progress.note(f"preprocessing: {preprocessing.describe()}")
    return model, preprocessing


def preprocessing_of(model: "nn.Module", config: Config) -> "Preprocessing":
    """As the model's own data config asks, but for the size of image that `--model-arg img_size` built it for."""
    from fimaq.data import resolve_preprocessing

    side = config.model_args.get("img_size")
    size = (3, side, side) if isinstance(side, int) else None
    return resolve_preprocessing(model, input_size=size, crop_pct=config.crop_pct)


def images_for(run: dict[str, Any], folder: Path, at_most: int, progress: Any) -> "Tensor":
    """Readable images of `folder`, drawn and preprocessed as the run of this configuration did with its own."""
    from fimaq.data import Preprocessing, build_transform, load_calibration

    progress.note(f"reading up to {at_most} images from {folder}")
    transform = build_transform(Preprocessing.from_dict(run["preprocessing"]))
    found = load_calibration(folder, at_most, transform, run["settings"]["seed"], fewer=True)
    if found.skipped:
        path, reason = found.skipped[0]
        progress.note(f"unreadable images skipped: {len(found.skipped)}, such as {path} ({reason})")
    return found.images
