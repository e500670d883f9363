"""Calibration images of one rank among several: each decodes its own, and all agree on which these are."""

import hashlib
import os
import random
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fimaq.data.folder import CalibrationSet, OnProgress, _decode, _too_few, list_images
from fimaq.data.image import UnreadableImage
from fimaq.data.ordered import default_workers, map_in_order
from fimaq.data.preprocess import Transform
from fimaq.errors import InputError
from fimaq.ranks import Ranks


def load_share(
    folder: Path, size: int, transform: Transform, seed: int, ranks: Ranks, progress: OnProgress | None = None
) -> CalibrationSet:
    """What `load_calibration` draws, with the images of this rank alone: every `ranks.size`-th of them.

    Paths, what was skipped and the fingerprint are those of the whole set. Ranks on other machines read a folder
    of their own with the same files. Where one cannot be read, all after it move up, and to other ranks: then
    everything is read once more.
    """
    order = _names_of_first(folder, seed, ranks)
    skipped: dict[str, str] = {}
    while True:
        used = [name for name in order if name not in skipped][:size]
        if len(used) < size:
            raise InputError(_too_few(folder, size, len(order), [(folder / n, r) for n, r in skipped.items()]))
        own = used[ranks.rank :: ranks.size]
        images, digests, unreadable = _decode_all(folder, own, transform, progress)
        found = {name: reason for part in ranks.collect(unreadable) for name, reason in part.items()}
        if not found:
            break
        skipped |= found
    digest = hashlib.sha256()
    of_ranks = ranks.collect(digests)
    for number, name in enumerate(used):
        content = bytes.fromhex(of_ranks[number % ranks.size][number // ranks.size])
        digest.update(os.fsencode(name) + b"\0" + content)
    return CalibrationSet(
        images,
        [folder / name for name in used],
        [(folder / name, skipped[name]) for name in order if name in skipped],
        digest.hexdigest(),
    )


def _names_of_first(folder: Path, seed: int, ranks: Ranks) -> list[str]:
    """Names of all images below the folder as the first rank sees them, in the drawn order."""

    def drawn() -> tuple[dict[str, Tensor], list[str]]:
        order = list_images(folder)
        random.Random(seed).shuffle(order)
        return {}, [path.relative_to(folder).as_posix() for path in order]

    names: list[str] = ranks.from_rank(0, drawn)[1]
    return names


def _decode_all(
    folder: Path, names: list[str], transform: Transform, progress: OnProgress | None
) -> tuple[Tensor, list[str], dict[str, str]]:
    """Images (n, 3, H, W), the hexadecimal digests of their files, and why some could not be read."""
    images: Tensor | None = None
    digests: list[str] = []
    unreadable: dict[str, str] = {}
    workers = default_workers()
    paths = [folder / name for name in names]
    decoded = map_in_order(partial(_decode, transform=transform), paths, workers, ahead=2 * workers)
    for name, result in zip(names, decoded, strict=True):
        if isinstance(result, UnreadableImage):
            unreadable[name] = result.reason
            continue
        if images is None:
            images = torch.empty(len(names), *result.image.shape)
        images[len(digests)] = result.image
        digests.append(result.digest.hex())
        if progress is not None:
            progress(len(digests), len(names))
    return torch.empty(0) if images is None else images, digests, unreadable
