"""Which class index each validation folder stands for, and the labelled set built from it.

A wrong mapping gives a wrong accuracy without any other sign, so folders are never matched by guesswork.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timm.data import ImageNetInfo, infer_imagenet_subset

from fimaq.data.folder import ValidationSet, check_folder, find_images, names_image
from fimaq.data.preprocess import Transform
from fimaq.errors import InputError

CLASS_MAP_HELP = 'give a mapping with --class-map FILE.json ({"folder": index})'


@dataclass(frozen=True)
class ClassMapping:
    """Folder name -> class index in [0, num_classes), and a phrase that tells a person where it came from."""

    indices: dict[str, int]
    source: str


def map_classes(
    folders: Sequence[str],
    num_classes: int,
    class_map: Mapping[str, int] | Path | None = None,
    label_names: Sequence[str] | None = None,
    pretrained_cfg: Mapping[str, Any] | None = None,
) -> ClassMapping:
    """Map folder names to class indices, by the first of these that applies.

    1. `class_map`, a mapping or a JSON file of one: it must cover every folder.
    2. The model's label names (`label_names`, else those in `pretrained_cfg`), where every folder is one.
    3. ImageNet synsets, where every folder is a wnid and timm knows an ImageNet of `num_classes` classes.
    4. Names that are integers, where all are in range.
    5. Rank among the sorted names, only where every class has its folder.

    Anything else is an InputError that names the folders.
    """
    if not folders:
        raise InputError("there are no class folders to map")
    if class_map is not None:
        return _by_class_map(folders, num_classes, class_map)
    labels = label_names if label_names is not None else (pretrained_cfg or {}).get("label_names")
    return (
        _by_label_names(folders, num_classes, labels)
        or _by_synsets(folders, num_classes)
        or _by_integers(folders, num_classes)
        or _by_rank(folders, num_classes)
    )


def validation_set(
    folder: Path,
    num_classes: int,
    transform: Transform,
    class_map: Mapping[str, int] | Path | None = None,
    pretrained_cfg: Mapping[str, Any] | None = None,
    limit: int | None = None,
) -> tuple[ValidationSet, ClassMapping]:
    """The labelled images of `folder`, one sub-folder per class, sorted by class folder and then by file.

    Sub-folders without images are passed over. `limit` evaluates that many images, spread over all classes.
    """
    check_folder(folder)
    layout = f"expected one folder per class, {folder}/CLASS/image.jpg"
    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    images = {entry.name: found for entry in entries if entry.is_dir() and (found := find_images(entry))}
    if loose := [entry.name for entry in entries if entry.is_file() and names_image(entry.name)]:
        raise InputError(
            f"validation folder {folder} holds images outside class folders ({_some(loose)}): {layout}"
        )
    if not images:
        raise InputError(f"validation folder {folder} has no class folders with images: {layout}")
    mapping = map_classes(list(images), num_classes, class_map, pretrained_cfg=pretrained_cfg)
    samples = [(path, mapping.indices[name]) for name, paths in images.items() for path in paths]
    return ValidationSet(samples, transform, limit), mapping


def data_folders(data: Path, needs_train: bool = True) -> tuple[Path, Path | None]:
    """`data`/train, which must exist if it is needed, and `data`/val, or None where it does not exist."""
    calib, val = data / "train", data / "val"
    if not data.is_dir():
        raise InputError(f"data folder {data} does not exist: expected {calib} and, with labels, {val}")
    if needs_train and not calib.is_dir():
        raise InputError(f"data folder {data} has no folder 'train': expected the calibration images in {calib}")
    return calib, val if val.is_dir() else None


def _by_class_map(folders: Sequence[str], num_classes: int, class_map: Mapping[str, int] | Path) -> ClassMapping:
    if isinstance(class_map, Path):
        name, entries = f"class map {class_map}", _read_class_map(class_map)
    else:
        name, entries = "class map", class_map
    if missing := [folder for folder in folders if folder not in entries]:
        raise InputError(f"{name} has no index for {_some(missing)}")
    indices = {folder: entries[folder] for folder in folders}
    # bool is an int to Python, but "true" is not a class index.
    wrong = [
        f"{folder}: {index!r}"
        for folder, index in indices.items()
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < num_classes
    ]
    if wrong:
        raise InputError(f"{name} must give indices from 0 to {num_classes - 1}, not {_some(wrong)}")
    return ClassMapping(indices, name)


def _read_class_map(path: Path) -> Mapping[str, Any]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f'class map {path} cannot be read as JSON ({{"folder": index}}): {error}') from None
    if not isinstance(entries, dict):
        raise InputError(f'class map {path} must hold {{"folder": index}}, not a {type(entries).__name__}')
    return entries


def _by_label_names(folders: Sequence[str], num_classes: int, labels: Sequence[str] | None) -> ClassMapping | None:
    """None where the labels are not this head's, do not hold every folder, or hold one twice ("crane")."""
    if not isinstance(labels, list | tuple) or len(labels) != num_classes:
        return None
    occurrences = Counter(labels)
    if any(occurrences[folder] != 1 for folder in folders):
        return None
    position = {label: index for index, label in enumerate(labels)}
    return ClassMapping({folder: position[folder] for folder in folders}, "label names carried by the model")


def _by_synsets(folders: Sequence[str], num_classes: int) -> ClassMapping | None:
    """The position in timm's synset list of the ImageNet with this many classes; some may be absent."""
    subset = infer_imagenet_subset({"num_classes": num_classes})
    if subset is None or not are_synsets(folders):
        return None
    title = subset.replace("imagenet", "ImageNet")
    position = {synset: index for index, synset in enumerate(ImageNetInfo(subset).label_names())}
    if unknown := [folder for folder in folders if folder not in position]:
        raise InputError(
            f"folder names not among the {num_classes} synsets of {title}: {_some(unknown)}; {CLASS_MAP_HELP}"
        )
    return ClassMapping({folder: position[folder] for folder in folders}, f"{title} synsets carried by timm")


def are_synsets(folders: Iterable[str]) -> bool:
    """Whether all names are WordNet's numbers, as folders of ImageNet are called."""
    return all(re.fullmatch(r"n\d{8}", folder) for folder in folders)


def _by_integers(folders: Sequence[str], num_classes: int) -> ClassMapping | None:
    if not all(folder.isascii() and folder.isdigit() for folder in folders):
        return None
    complete = len(folders) == num_classes
    if complete and sorted(folders) != sorted(folders, key=int):
        # 0, 1, 10, 2: a model trained through torchvision's ImageFolder has its classes in this order.
        raise InputError(
            f"the {num_classes} class folders are numbers whose order as numbers (2 before 10) differs from "
            f"their order as names (10 before 2), and training may have used either: {CLASS_MAP_HELP}"
        )
    indices = {folder: int(folder) for folder in folders}
    if max(indices.values()) >= num_classes or len(set(indices.values())) < len(folders):
        return None
    return ClassMapping(indices, "folder names, which are class indices")


def _by_rank(folders: Sequence[str], num_classes: int) -> ClassMapping:
    """Rank says which class a folder is only where none is missing, and none was renamed."""
    synsets = [folder for folder in folders if are_synsets([folder])]
    if 0 < len(synsets) < len(folders):
        other = next(folder for folder in folders if folder not in synsets)
        raise InputError(
            f"{len(synsets)} of {len(folders)} class folders have ImageNet names such as {synsets[0]}, and "
            f"{other} has none, so that its place among them says nothing: {CLASS_MAP_HELP}"
        )
    if len(folders) == num_classes:
        indices = {folder: index for index, folder in enumerate(sorted(folders))}
        return ClassMapping(indices, f"all {num_classes} folders in sorted order")
    raise InputError(
        f"{len(folders)} class folders ({_some(folders)}) cannot be matched to the model's {num_classes} "
        f"classes: {CLASS_MAP_HELP}"
    )


def _some(names: Sequence[str], most: int = 3) -> str:
    """The first few names, and how many more there are."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
