"""Average precision: the ground truth scores 100, and what is known of wrong detections is what comes out."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from fimaq.data.coco import CocoAnnotation, CocoCategory, CocoImage, CocoSet, find_coco
from fimaq.detection.evaluate import METRICS, coco_results, encode_masks, evaluate_coco
from fimaq.errors import FimaqError, InputError

SIZE = 200
ZEROS = dict.fromkeys(METRICS, 0.0)
NOTHING = dict.fromkeys(METRICS)


def coco_set(*boxes: tuple[float, float, float, float], images: int = 1, **changes: Any) -> CocoSet:
    """Rectangles of one category on image 1; the boxes are x, y, width, height."""
    records = {id: CocoImage(id, f"{id}.jpg", SIZE, SIZE, Path(f"{id}.jpg")) for id in range(1, images + 1)}
    objects = []
    for number, (x, y, w, h) in enumerate(boxes):  # from 0: an id that COCOeval takes for no match
        given: dict[str, Any] = {"crowd": False, "segmentation": [[x, y, x, y + h, x + w, y + h, x + w, y]]}
        given |= changes
        objects.append(CocoAnnotation(number, 1, 3, 0, (x, y, w, h), max(0, w) * max(0, h), **given))
    categories = [CocoCategory(3, "thing"), CocoCategory(9, "other")]
    return CocoSet(records, categories, {id: objects if id == 1 else [] for id in records})


def detections(coco: CocoSet, image_id: int) -> list[dict[str, Any]]:
    """The ground truth of an image as detections."""
    objects = coco.annotations[image_id]
    image = coco.images[image_id]
    boxes = torch.tensor([[x, y, x + w, y + h] for x, y, w, h in (a.box for a in objects)]).view(-1, 4)
    masks = (
        np.stack([coco.mask(a) for a in objects]) if objects else np.zeros((0, image.height, image.width), bool)
    )
    labels = torch.tensor([a.label for a in objects], dtype=torch.long)
    return coco_results(
        image_id, boxes, torch.ones(len(objects)), labels, torch.from_numpy(masks), coco.category_ids
    )


def shifted(results: list[dict[str, Any]], by: int) -> list[dict[str, Any]]:
    """The detections' boxes moved right; the masks stay."""
    return [{**r, "bbox": [r["bbox"][0] + by, *r["bbox"][1:]]} for r in results]


def assert_perfect(scores: dict[str, float | None]) -> None:
    assert {name: round(value, 9) for name, value in scores.items() if value is not None} == {
        name: 100.0 for name, value in scores.items() if value is not None
    }
    assert scores["AP"] is not None


@pytest.mark.shared
@pytest.mark.parametrize("split", ["train", "val"])
def test_ground_truth_of_real_coco_images_scores_100(shared, split):
    coco = CocoSet.open(*find_coco(shared / "coco-subset", split))
    results = [result for image_id in coco.images for result in detections(coco, image_id)]
    assert any(a.crowd for objects in coco.annotations.values() for a in objects)
    scores = evaluate_coco(coco, results, coco.images)
    for kind in ("bbox", "segm"):
        assert_perfect(scores[kind])
        assert None not in scores[kind].values()


@pytest.mark.shared
def test_imperfect_detections_score_as_pycocotools_alone_scores_them(shared):
    """Its own reading of the file and of the results, on half of the images, with moved boxes and mixed labels."""
    annotations, images = find_coco(shared / "coco-subset", "val")
    coco = CocoSet.open(annotations, images)
    chosen = list(coco.images)[::2]
    rng = np.random.default_rng(0)
    results = [result for image_id in coco.images for result in detections(coco, image_id)]
    for result in results:
        x, y, width, height = result["bbox"]
        result["bbox"] = [x + 0.2 * width * rng.normal(), y, width, height * rng.uniform(0.8, 1.2)]
        result["score"] = float(rng.random())
        if rng.random() < 0.2:
            result["category_id"] = int(rng.choice(coco.category_ids[:3]))
    expected = {}
    for kind in ("bbox", "segm"):
        given = copy.deepcopy(results)
        for result in given:
            result.pop("bbox" if kind == "segm" else "segmentation")
        truth = COCO(str(annotations))
        evaluation = COCOeval(truth, truth.loadRes(given), kind)
        evaluation.params.imgIds = chosen
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
        expected[kind] = dict(zip(METRICS, 100 * evaluation.stats[:6], strict=True))
    assert 5 < expected["bbox"]["AP"] < 60
    scores = evaluate_coco(coco, results, chosen)
    for kind in ("bbox", "segm"):
        assert scores[kind] == pytest.approx(expected[kind])


def test_sizes_without_objects_have_no_score(capsys):
    coco = coco_set((10, 10, 20, 20), (50, 50, 60, 60))
    scores = evaluate_coco(coco, detections(coco, 1), [1])
    for kind in ("bbox", "segm"):
        assert_perfect(scores[kind])
        assert scores[kind]["APl"] is None
        assert None not in (scores[kind]["APs"], scores[kind]["APm"])
    assert capsys.readouterr().out == ""


def test_no_detections_score_0_and_no_objects_have_no_score():
    found = evaluate_coco(coco_set((10, 10, 20, 20)), [], [1])
    expected = {**ZEROS, "APm": None, "APl": None}
    assert found == {"bbox": expected, "segm": expected}
    empty = coco_set()
    assert evaluate_coco(empty, detections(coco_set((1, 1, 9, 9)), 1), [1]) == {"bbox": NOTHING, "segm": NOTHING}


def test_a_shifted_box_counts_up_to_its_overlap():
    coco = coco_set((10, 10, 60, 60))
    scores = evaluate_coco(coco, shifted(detections(coco, 1), 10), [1])
    # 50 / 70 = 0.714 passes the thresholds 0.50 to 0.70, which are 5 of 10.
    assert scores["bbox"]["AP"] == pytest.approx(50)
    assert scores["bbox"]["AP50"] == pytest.approx(100)
    assert scores["bbox"]["AP75"] == pytest.approx(0)
    assert scores["segm"]["AP"] == pytest.approx(100)


def test_images_without_objects_count_their_detections_as_false():
    coco = coco_set((10, 10, 60, 60), images=2)
    right = detections(coco, 1)
    wrong = [{**right[0], "image_id": 2, "score": 2.0}]
    assert evaluate_coco(coco, right + wrong, [1, 2])["bbox"]["AP"] == pytest.approx(50)
    assert evaluate_coco(coco, right + wrong, [1])["bbox"]["AP"] == pytest.approx(100)


def test_detections_within_a_crowd_are_neither_right_nor_wrong():
    single, crowd = coco_set((10, 10, 40, 40)), coco_set((100, 100, 80, 80), crowd=True)
    coco = CocoSet(single.images, single.categories, {1: single.annotations[1] + crowd.annotations[1]})
    inside = detections(coco_set((110, 110, 20, 20), (140, 110, 20, 20), (110, 150, 20, 20)), 1)
    results = inside + [{**result, "score": 0.5} for result in detections(single, 1)]
    for scores in evaluate_coco(coco, results, [1]).values():
        assert_perfect(scores)
    outside = detections(coco_set((10, 100, 20, 20)), 1)
    assert evaluate_coco(coco, results + outside, [1])["bbox"]["AP"] == pytest.approx(50)


def test_degenerate_boxes_are_objects_that_cannot_be_found():
    coco = coco_set((10, 10, 60, 60), (100, 100, 0, 20), (150, 150, -5, 10))
    scores = evaluate_coco(coco, detections(coco_set((10, 10, 60, 60)), 1), [1])
    # Recall ends at a third: precision is 1 at 34 of the 101 levels 0.00, 0.01, ..., 1.00.
    assert scores["bbox"]["AP"] == pytest.approx(100 * 34 / 101)
    evaluate_coco(coco, detections(coco, 1), [1])


def test_objects_without_a_mask_are_left_out_of_the_masks_score():
    coco = coco_set((10, 10, 60, 60), segmentation=None)
    scores = evaluate_coco(coco, detections(coco, 1), [1])
    assert_perfect(scores["bbox"])
    assert scores["segm"] == NOTHING


def test_a_detector_of_boxes_has_no_masks_score():
    coco = coco_set((10, 10, 60, 60))
    box, label = torch.tensor([[10, 10, 70, 70.0]]), torch.zeros(1, dtype=torch.long)
    results = coco_results(1, box, torch.ones(1), label, None, [3, 9])
    scores = evaluate_coco(coco, results, [1])
    assert_perfect(scores["bbox"])
    assert scores["segm"] == NOTHING
    with pytest.raises(InputError, match="1 of 2 detections have masks: expected all or none"):
        evaluate_coco(coco, results + detections(coco, 1), [1])


def test_the_size_of_a_mask_is_its_own_and_not_that_of_its_box():
    # A false frame of 100 x 100 pixels, one pixel wide: small by its mask, large by its box.
    coco = coco_set((10, 10, 20, 20))
    frame = torch.zeros(1, SIZE, SIZE, dtype=torch.bool)
    frame[:, 90:190, 90:190] = True
    frame[:, 91:189, 91:189] = False
    box, label = torch.tensor([[90, 90, 190, 190.0]]), torch.zeros(1, dtype=torch.long)
    false = coco_results(1, box, torch.full((1,), 2.0), label, frame, [3, 9])
    scores = evaluate_coco(coco, detections(coco, 1) + false, [1])
    assert scores["bbox"]["APs"] == pytest.approx(100)
    assert scores["segm"]["APs"] == pytest.approx(50)


def test_results_are_in_the_format_of_coco():
    masks = torch.from_numpy(np.random.default_rng(0).random((2, 30, 50)) < 0.3)
    boxes = torch.tensor([[1, 2, 11, 22.5], [0, 0, 50, 30]])
    results = coco_results(5, boxes, torch.tensor([0.5, 0.25]), torch.tensor([1, 0]), masks, [3, 9])
    assert [r["bbox"] for r in results] == [[1, 2, 10, 20.5], [0, 0, 50, 30]]
    assert [(r["image_id"], r["category_id"], r["score"]) for r in results] == [(5, 9, 0.5), (5, 3, 0.25)]
    image = CocoImage(5, "5.jpg", 50, 30, Path("5.jpg"))
    for mask, result in zip(masks, results, strict=True):
        read = CocoAnnotation(1, 5, 3, 0, (0, 0, 1, 1), 1, False, result["segmentation"])
        assert np.array_equal(CocoSet({5: image}, [], {5: [read]}).mask(read), mask.numpy())
    assert coco_results(5, boxes[:0], torch.ones(0), torch.ones(0), masks[:0], [3, 9]) == []


def test_masks_that_are_no_rectangles_of_memory_are_encoded_alike():
    masks = torch.from_numpy(np.random.default_rng(0).random((3, 20, 30)) < 0.5)
    assert encode_masks(masks.transpose(1, 2).contiguous().transpose(1, 2)) == encode_masks(masks)


@pytest.mark.parametrize("bad", ["boxes", "scores"])
def test_numbers_that_are_not_finite_are_refused(bad):
    given = {"boxes": torch.ones(2, 4), "scores": torch.ones(2)}
    given[bad][1] = float("nan")
    with pytest.raises(FimaqError, match=r"image 4 .*not finite"):
        coco_results(4, **given, labels=torch.zeros(2, dtype=torch.long), masks=None, category_ids=[1])


def test_labels_images_and_categories_that_the_set_lacks_are_refused():
    coco = coco_set((10, 10, 60, 60))
    with pytest.raises(InputError, match=r"image 1 have labels 0 to 2: .*2 categories are labels 0 to 1"):
        coco_results(1, torch.ones(2, 4), torch.ones(2), torch.tensor([0, 2]), None, [3, 9])
    right = detections(coco, 1)
    with pytest.raises(InputError, match="image id 8 is not one of the data set's 1 images"):
        evaluate_coco(coco, [{**right[0], "image_id": 8}], [1])
    with pytest.raises(InputError, match="image id 6 is not one"):
        evaluate_coco(coco, right, [1, 6])
    with pytest.raises(InputError, match=r"category 4: the data set has \[3, 9\]"):
        evaluate_coco(coco, [{**right[0], "category_id": 4}], [1])
    with pytest.raises(InputError, match="at least one image id"):
        evaluate_coco(coco, right, [])


def test_the_results_handed_in_are_left_as_they_were():
    coco = coco_set((10, 10, 60, 60))
    results = detections(coco, 1)
    before = [dict(result) for result in results]
    first = evaluate_coco(coco, results, [1])
    assert results == before
    assert evaluate_coco(coco, results, [1]) == first
