"""COCO-format data: what is read, what is refused and how, and how an image reaches a detector."""

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coder

from fimaq.data.coco import CocoSet, calibration_folder, find_coco, run_lengths
from fimaq.data.detection_image import DetectionPreprocessing
from fimaq.errors import InputError

WIDTH, HEIGHT = 12, 9
SQUARE = np.zeros((HEIGHT, WIDTH), dtype=np.uint8)
SQUARE[2:5, 3:8] = 1
POLYGON = [[3, 2, 8, 2, 8, 5, 3, 5]]
RUNS = [3 * HEIGHT + 2, 3, 6, 3, 6, 3, 6, 3, 6, 3, 4 + 4 * HEIGHT]


def compressed(mask: np.ndarray) -> dict[str, Any]:
    rle = coder.encode(np.asfortranarray(mask))
    return {"size": list(rle["size"]), "counts": rle["counts"].decode()}


def annotation(id: int = 1, **changes: Any) -> dict[str, Any]:
    given = {
        "image_id": 7,
        "category_id": 20,
        "bbox": [3, 2, 5, 3],
        "area": 15,
        "iscrowd": 0,
        "segmentation": POLYGON,
    }
    return {"id": id, **given, **changes}


@pytest.fixture
def content() -> dict[str, Any]:
    """Two images, of which the second has no objects, and two categories, listed out of the order of their ids."""
    images = [{"id": id, "file_name": f"{id}.png", "width": WIDTH, "height": HEIGHT} for id in (7, 3)]
    categories = [{"id": 20, "name": "cat"}, {"id": 5, "name": "dog"}]
    return {"images": images, "annotations": [annotation()], "categories": categories}


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[Any], CocoSet]:
    """opened(content) writes the instances file beside the images 7.png and 3.png and opens both."""
    folder = tmp_path / "images"
    folder.mkdir()
    for id in (7, 3):
        Image.new("RGB", (WIDTH, HEIGHT)).save(folder / f"{id}.png")

    def open_set(content: Any) -> CocoSet:
        path = tmp_path / "instances.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return CocoSet.open(path, folder)

    return open_set


def test_labels_are_the_ranks_of_the_category_ids(content, opened):
    coco = opened(content)
    assert coco.category_ids == [5, 20]
    assert [category.name for category in coco.categories] == ["dog", "cat"]
    assert coco.annotations[7][0].label == 1
    assert coco.annotations[7][0].box == (3.0, 2.0, 5.0, 3.0)
    image = coco.images[7]
    assert (image.width, image.height, image.path.name) == (WIDTH, HEIGHT, "7.png")


def test_images_without_objects_and_degenerate_boxes_are_kept(content, opened):
    content["annotations"] += [annotation(2, bbox=[3, 2, 0, 3]), annotation(3, bbox=[3, 2, -1, -1])]
    coco = opened(content)
    assert list(coco.images) == [7, 3]
    assert coco.annotations[3] == []
    assert [a.id for a in coco.annotations[7]] == [1, 2, 3]


@pytest.mark.parametrize(
    "segmentation",
    [POLYGON, {"size": [HEIGHT, WIDTH], "counts": RUNS}, compressed(SQUARE), None, []],
    ids=["polygon", "uncompressed", "compressed", "none", "empty"],
)
def test_every_form_of_segmentation_gives_the_same_mask(content, opened, segmentation):
    content["annotations"] = [annotation(segmentation=segmentation, iscrowd=1)]
    coco = opened(content)
    read = coco.annotations[7][0]
    assert read.crowd
    assert np.array_equal(coco.mask(read), SQUARE)


def test_parts_of_an_object_are_one_mask(content, opened):
    content["annotations"] = [annotation(segmentation=[[3, 2, 5, 2, 5, 5, 3, 5], [5, 2, 8, 2, 8, 5, 5, 5]])]
    coco = opened(content)
    assert np.array_equal(coco.mask(coco.annotations[7][0]), SQUARE)


def test_run_lengths_agree_with_pycocotools():
    rng = np.random.default_rng(0)
    for share in (0.0, 0.02, 0.5, 1.0):
        mask = (rng.random((37, 53)) < share).astype(np.uint8)
        runs = run_lengths(compressed(mask)["counts"])
        values = np.repeat(np.arange(len(runs)) % 2, runs)
        assert np.array_equal(values.reshape(53, 37).T, mask)


def changed(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["annotations"][0].update(changes)


def without(key: str, kind: str | None = None) -> Callable[[dict[str, Any]], None]:
    return lambda content: (content if kind is None else content[kind][0]).pop(key)


def doubled(kind: str) -> Callable[[dict[str, Any]], None]:
    return lambda content: content[kind].append(content[kind][0])


def image_changed(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["images"][0].update(changes)


def rle(counts: Any, size: list[int] | None = None) -> dict[str, Any]:
    return {"size": [HEIGHT, WIDTH] if size is None else size, "counts": counts}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without("images"), r"key 'images' is missing.*'categories'"),
        (without("annotations"), r"key 'annotations' is missing"),
        (without("categories"), r"key 'categories' is missing"),
        (lambda content: content.update(images={}), r"key 'images' is not a list"),
        (lambda content: content.update(images=[4]), r"images\[0\] is 4: expected an object"),
        (without("id", "images"), r"images\[0\] has no 'id': expected a whole number"),
        (without("file_name", "images"), r"image 7 has no 'file_name'"),
        (without("name", "categories"), r"category 20 has no 'name'"),
        (without("bbox", "annotations"), r"annotation 1 has no 'bbox': expected \[x, y, width, height\]"),
        (without("area", "annotations"), r"annotation 1 has no 'area': expected a number"),
        (doubled("images"), r"image id 7 is given twice"),
        (doubled("annotations"), r"annotation id 1 is given twice"),
        (doubled("categories"), r"category id 20 is given twice"),
        (changed(image_id=8), r"annotation 1 is of image 8, which is not one of its 2 images"),
        (changed(category_id=6), r"annotation 1 is of category 6: expected one of \[5, 20\]"),
        (changed(bbox=[1, 2, 3]), r"'bbox' of annotation 1 is \[1.0, 2.0, 3.0\]: expected \[x, y"),
        (changed(bbox=[1, 2, 3, "4"]), r"'bbox' of annotation 1 is \[1, 2, 3, '4'\]"),
        (changed(bbox=[1, [2, 3], 3, 4]), r"'bbox' of annotation 1"),
        (changed(area=float("nan")), r"'area' of annotation 1 is \[nan\]"),
        (changed(iscrowd=2), r"'iscrowd' of annotation 1 is 2: expected 0 or 1"),
        (changed(segmentation=[[1, 2, 3, 4]]), r"polygon in 'segmentation' of annotation 1.*3 points or more"),
        (changed(segmentation=[[1, 2, 3, 4, 5, 6, 7]]), r"polygon in 'segmentation' of annotation 1"),
        (changed(segmentation="mask"), r"'segmentation' of annotation 1 is 'mask': expected polygons or an RLE"),
        (changed(segmentation=rle(RUNS, [WIDTH, HEIGHT])), r"size of .* is \[12, 9\]: expected \[9, 12\]"),
        (changed(segmentation=rle([5, 5])), r"counts of .* add up to 108 pixels"),
        (changed(segmentation=rle([-1, 109])), r"counts of .* at least 0"),
        (changed(segmentation=rle("0000")), r"counts of .* add up to 108 pixels"),
        (changed(segmentation=rle("é~")), r"counts of .* add up to 108 pixels"),
        (image_changed(file_name="absent.png"), r"image 7 is 'absent.png', but .*absent.png does not exist"),
        (image_changed(width=13), r"image 7 is 13 x 9 pixels, but .*7.png has 12 x 9"),
        (image_changed(width=HEIGHT, height=WIDTH), r"image 7 is 9 x 12 pixels, but .*7.png has 12 x 9"),
        (image_changed(width="12"), r"'width' of image 7 is '12': expected a whole number of at least 1"),
    ],
)
def test_bad_files_are_errors_that_name_the_file_and_the_thing(content, opened, spoil, message):
    spoiled = copy.deepcopy(content)
    spoil(spoiled)
    with pytest.raises(InputError, match=rf"instances\.json: .*{message}"):
        opened(spoiled)


@pytest.mark.parametrize(
    ("text", "message"), [("{", "is not JSON"), ("[]", "holds a list"), ("\x00", "is not JSON")]
)
def test_a_file_that_is_no_instances_file_is_an_error(opened, text, message):
    with pytest.raises(InputError, match=rf"instances\.json: {message}.*expected"):
        opened(text)


def test_missing_files_and_folders_and_unreadable_images_are_errors(tmp_path, content, opened):
    with pytest.raises(InputError, match=r"nowhere\.json: cannot be read"):
        CocoSet.open(tmp_path / "nowhere.json", tmp_path)
    opened(content)
    with pytest.raises(InputError, match=r"folder .*nowhere does not exist"):
        CocoSet.open(tmp_path / "instances.json", tmp_path / "nowhere")
    (tmp_path / "images" / "7.png").write_text("<html>")
    with pytest.raises(InputError, match=r"image 7 is .*7\.png, which cannot be read as an image"):
        opened(content)


def test_without_pycocotools_the_error_says_what_to_install(content, opened, monkeypatch):
    coco = opened(content)
    monkeypatch.setitem(sys.modules, "pycocotools.mask", None)
    with pytest.raises(InputError, match=r"pip install 'fimaq\[detection\]'"):
        coco.mask(coco.annotations[7][0])


@pytest.mark.parametrize("names", [("train2017", "val2017"), ("train", "val")])
def test_both_layouts_are_found(tmp_path, make_images, names):
    (tmp_path / "annotations").mkdir()
    for name in names:
        (tmp_path / "annotations" / f"instances_{name}.json").touch()
        make_images(tmp_path / name, 3)
    for split, name in zip(("train", "val"), names, strict=True):
        assert find_coco(tmp_path, split) == (tmp_path / "annotations" / f"instances_{name}.json", tmp_path / name)
    assert calibration_folder(tmp_path) == tmp_path / names[0]


def test_a_missing_split_is_an_error_that_says_what_was_looked_for(tmp_path, make_images):
    make_images(tmp_path / "val", 2)
    (tmp_path / "annotations").mkdir()
    looked_for = r"annotations/instances_val2017\.json with val2017/ and annotations/instances_val\.json with val/"
    with pytest.raises(InputError, match=looked_for):
        find_coco(tmp_path, "val")
    with pytest.raises(InputError, match=r"neither train2017/ nor train/"):
        calibration_folder(tmp_path)


def test_calibration_images_may_be_any_folder(tmp_path):
    assert calibration_folder(tmp_path) == tmp_path


def test_exif_rotation_is_ignored_as_the_annotations_ignore_it(tmp_path, content, opened):
    exif = Image.Exif()
    exif[0x0112] = 6
    opened(content)
    path = tmp_path / "images" / "7.png"
    Image.new("RGB", (WIDTH, HEIGHT)).save(path, exif=exif)
    assert opened(content).images[7].width == WIDTH
    assert DetectionPreprocessing().load(path).original_size == (HEIGHT, WIDTH)
