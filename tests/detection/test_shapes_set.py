"""The data set of textured shapes that the detection benchmark trains on."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from benchmark_scripts import benchmark_script
from PIL import Image

from fimaq.data.coco import CocoSet, find_coco

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "make_shapes.py"
SIZE = 128


@pytest.fixture(scope="module")
def shapes() -> ModuleType:
    return benchmark_script("make_shapes")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made by the command itself, in two processes."""
    folder = tmp_path_factory.mktemp("shapes") / "set"
    command = [sys.executable, SCRIPT, folder, "--train", "20", "--val", "12", "--size", str(SIZE), "--seed", "3"]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_the_same_seed_gives_the_same_files_however_many_processes(shapes, written, tmp_path):
    for split, count in (("train", 20), ("val", 12)):
        shapes.write_split(tmp_path / "again", split, count, SIZE, seed=3, processes=1)
    shapes.write_split(tmp_path / "other", "val", 12, SIZE, seed=4, processes=1)
    again, other = files(tmp_path / "again"), files(tmp_path / "other")
    assert files(written) == again
    assert len(again) == 20 + 12 + 2
    assert all(again[name] != content for name, content in other.items())
    assert again["train/000001.jpg"] != again["val/000001.jpg"]


def test_both_splits_load_and_every_mask_fills_its_box(written):
    for split, count in (("train", 20), ("val", 12)):
        coco = CocoSet.open(*find_coco(written, split))
        assert len(coco.images) == count
        for objects in coco.annotations.values():
            assert 1 <= len(objects) <= 8
            for annotation in objects:
                mask = coco.mask(annotation)
                assert mask.shape == (SIZE, SIZE)
                assert annotation.area == mask.sum()
                rows, columns = (np.flatnonzero(mask.any(axis=axis)) for axis in (1, 0))
                x, y, width, height = annotation.box
                assert (x, x + width) == (columns[0], columns[-1] + 1)
                assert (y, y + height) == (rows[0], rows[-1] + 1)


def test_masks_are_the_visible_parts(written):
    coco = CocoSet.open(*find_coco(written, "train"))
    for objects in coco.annotations.values():
        assert sum(coco.mask(annotation).astype(int) for annotation in objects).max() == 1


def test_all_categories_and_sizes_occur(shapes):
    rng = np.random.default_rng(0)
    visible = [found for _ in range(60) for found in shapes.scene(rng, 256)[1]]
    assert {category for category, _ in visible} == set(range(1, len(shapes.SHAPES) + 1))
    areas = [mask.sum() for _, mask in visible]
    for low, high in ((0, 32**2), (32**2, 96**2), (96**2, 256**2)):
        assert sum(low < area <= high for area in areas) > len(areas) / 20


def test_shapes_differ_from_the_ground(shapes):
    """What lies in a mask has another mean colour than the ground in most images: there is something to learn."""
    rng = np.random.default_rng(1)
    distances = []
    for _ in range(20):
        image, visible = shapes.scene(rng, 128)
        ground = ~np.logical_or.reduce([mask for _, mask in visible])
        distances += [np.linalg.norm(image[mask].mean(0) - image[ground].mean(0)) for _, mask in visible]
    assert np.median(distances) > 60


def test_images_are_rgb_jpegs_of_the_size_asked_for(written):
    with Image.open(written / "val" / "000001.jpg") as image:
        assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (SIZE, SIZE))


def test_a_folder_that_is_in_use_is_refused(written):
    command = [sys.executable, SCRIPT, written, "--train", "1", "--val", "1"]
    refused = subprocess.run(command, check=False, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "exists: give a new folder" in refused.stderr
