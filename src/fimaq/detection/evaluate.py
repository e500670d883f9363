"""Average precision of detections by COCO's own evaluation (pycocotools)."""

import io
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fimaq.data.coco import CocoSet, pycocotools
from fimaq.errors import FimaqError, InputError

METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl")
"""The first six of COCO's summary, in its order."""

Result = dict[str, Any]
"""One detection in COCO's results format: image_id, category_id, bbox [x, y, w, h], score and segmentation."""
Scores = dict[str, float | None]


def coco_results(
    image_id: int,
    boxes: Tensor,
    scores: Tensor,
    labels: Tensor,
    masks: Tensor | None,
    category_ids: Sequence[int],
) -> list[Result]:
    """The detections of one image in COCO's results format.

    `boxes` (k, 4) x1 y1 x2 y2 in pixels of the original image, `scores` (k,), `labels` (k,) in
    0..len(category_ids)-1, `masks` (k, H, W) bool at the original size. Numbers that are not finite are an
    error: COCOeval would count a box of NaNs as a perfect match.
    """
    if not (torch.isfinite(boxes).all() and torch.isfinite(scores).all()):
        raise FimaqError(f"detections in image {image_id} have boxes or scores that are not finite numbers")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(category_ids):
        raise InputError(
            f"detections in image {image_id} have labels {int(labels.min())} to {int(labels.max())}: the data "
            f"set's {len(category_ids)} categories are labels 0 to {len(category_ids) - 1}"
        )
    boxes = boxes.detach().double().cpu()
    results: list[Result] = [
        {"image_id": image_id, "category_id": category_ids[label], "bbox": box, "score": score}
        for label, box, score in zip(
            labels.tolist(),
            torch.cat((boxes[:, :2], boxes[:, 2:] - boxes[:, :2]), dim=1).tolist(),
            scores.tolist(),
            strict=True,
        )
    ]
    if masks is not None and results:
        for result, rle in zip(results, encode_masks(masks), strict=True):
            result["segmentation"] = rle
    return results


def encode_masks(masks: Tensor) -> list[dict[str, Any]]:
    """(k, H, W) bool -> k compressed RLEs whose counts are text, ready for JSON."""
    # pycocotools wants (H, W, k) in Fortran order, which is (k, W, H) as it lies in memory.
    columns = masks.detach().transpose(1, 2).to(torch.uint8).cpu().contiguous().numpy()
    encoded = pycocotools("mask").encode(columns.transpose(2, 1, 0))
    return [{"size": [int(edge) for edge in rle["size"]], "counts": rle["counts"].decode()} for rle in encoded]


def evaluate_coco(coco: CocoSet, results: Sequence[Result], image_ids: Iterable[int]) -> dict[str, Scores]:
    """{"bbox": scores, "segm": scores} over the images of `image_ids`; scores are METRICS in percent.

    A score is None where there is no ground truth of that kind. "segm" is all None where the results carry no
    masks. An object whose mask the data set does not tell is ignored there, as crowds are: it is neither to be
    found, nor do detections inside its box count as false. Results of other images are left out.
    """
    image_ids = sorted(set(image_ids))
    _check(coco, results, image_ids)
    boxes = _evaluate("bbox", coco, results, image_ids)
    with_masks = sum("segmentation" in result for result in results)
    if 0 < with_masks < len(results):
        raise InputError(f"{with_masks} of {len(results)} detections have masks: expected all or none")
    if results and not with_masks:
        return {"bbox": boxes, "segm": dict.fromkeys(METRICS)}
    return {"bbox": boxes, "segm": _evaluate("segm", coco, results, image_ids)}


def _check(coco: CocoSet, results: Sequence[Result], image_ids: Sequence[int]) -> None:
    if not image_ids:
        raise InputError("no images to evaluate: expected at least one image id")
    for image_id in (*image_ids, *{result["image_id"] for result in results}):
        if image_id not in coco.images:
            raise InputError(f"image id {image_id} is not one of the data set's {len(coco.images)} images")
    known = coco.category_ids
    for category_id in {result["category_id"] for result in results}:
        if category_id not in known:
            raise InputError(f"detections of category {category_id}: the data set has {known}")


def _evaluate(kind: str, coco: CocoSet, results: Sequence[Result], image_ids: Sequence[int]) -> Scores:
    """The scores by boxes (`kind` "bbox") or by masks ("segm")."""
    evaluated = set(image_ids)
    detections = [_detection(kind, result) for result in results if result["image_id"] in evaluated]
    evaluation_module = pycocotools("cocoeval")
    with redirect_stdout(io.StringIO()):  # pycocotools prints its progress and has no switch for it
        truth, found = _index(coco, _ground_truth(kind, coco, image_ids)), _index(coco, detections)
        evaluation = evaluation_module.COCOeval(truth, found, kind)
        evaluation.params.imgIds = list(image_ids)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    values = np.asarray(evaluation.stats)[: len(METRICS)].tolist()
    return {name: None if value < 0 else 100.0 * value for name, value in zip(METRICS, values, strict=True)}


def _ground_truth(kind: str, coco: CocoSet, image_ids: Sequence[int]) -> list[dict[str, Any]]:
    objects = [annotation for image_id in image_ids for annotation in coco.annotations[image_id]]
    return [
        {
            "image_id": annotation.image_id,
            "category_id": annotation.category_id,
            "bbox": list(annotation.box),
            "area": annotation.area,
            "iscrowd": int(annotation.crowd or (kind == "segm" and annotation.segmentation is None)),
            "segmentation": coco.rle(annotation) if kind == "segm" else None,
        }
        for annotation in objects
    ]


def _detection(kind: str, result: Result) -> dict[str, Any]:
    """A result with the area that its size class goes by: a mask's own, as in MMDetection, not that of its box."""
    if kind == "segm":
        area = float(pycocotools("mask").area(result["segmentation"]))
    else:
        area = result["bbox"][2] * result["bbox"][3]
    return {**result, "area": area, "iscrowd": 0}


def _index(coco: CocoSet, annotations: list[dict[str, Any]]) -> Any:
    """pycocotools' index of annotations, built here since its `loadRes` fails where there are none."""
    index = pycocotools("coco").COCO()
    index.dataset = {
        "images": [{"id": i.id, "height": i.height, "width": i.width} for i in coco.images.values()],
        "categories": [{"id": category.id, "name": category.name} for category in coco.categories],
        # COCOeval takes a match with id 0 for no match.
        "annotations": [{**annotation, "id": number} for number, annotation in enumerate(annotations, start=1)],
    }
    index.createIndex()
    return index
