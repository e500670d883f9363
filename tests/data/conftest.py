"""Tiny image files made on the spot."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fimaq.data import Preprocessing, Transform, build_transform

SIZE = 16


@pytest.fixture
def transform() -> Transform:
    """RGB -> (3, 16, 16), pixel values in [0, 1] untouched."""
    return build_transform(Preprocessing((3, SIZE, SIZE), mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)))


@pytest.fixture
def make_images() -> Callable[..., list[Path]]:
    """make_images(folder, count) writes 00.png, 01.png, ...: image i is a flat grey of value i."""

    def make(folder: Path, count: int) -> list[Path]:
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{index:02d}.png" for index in range(count)]
        for index, path in enumerate(paths):
            Image.new("RGB", (SIZE, SIZE), (index, index, index)).save(path)
        return paths

    return make


@pytest.fixture
def broken_jpegs(tmp_path: Path) -> dict[str, Path]:
    """What goes wrong in real folders: a cut download, an empty file, text with an image's name."""
    folder = tmp_path / "broken"
    folder.mkdir()
    paths = {name: folder / f"{name}.jpg" for name in ("truncated", "empty", "text")}
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(paths["truncated"])
    content = paths["truncated"].read_bytes()
    paths["truncated"].write_bytes(content[: len(content) // 2])
    paths["empty"].touch()
    paths["text"].write_text("<html>404 Not Found</html>")
    return paths


@pytest.fixture
def imagenet_subset() -> Path:
    folder = Path(os.environ.get("FIMAQ_SHARED", "../shared")) / "imagenet-subset"
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent: set FIMAQ_SHARED to the folder that holds imagenet-subset")
    return folder
