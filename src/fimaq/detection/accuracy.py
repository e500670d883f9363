"""Box and mask AP of detectors on a COCO-format data set."""

from typing import Any

import torch

from fimaq.data.coco import CocoSet
from fimaq.data.detection_image import DetectionPreprocessing, pad_to
from fimaq.data.image import UnreadableImage
from fimaq.detection.detections import rescale_and_paste
from fimaq.detection.detector import Detector
from fimaq.detection.evaluate import coco_results, evaluate_coco
from fimaq.errors import InputError
from fimaq.progress import Silent


@torch.no_grad()
def evaluate_detectors(
    detectors: dict[str, Detector],
    coco: CocoSet,
    preprocessing: DetectionPreprocessing,
    device: torch.device,
    progress: Silent,
    limit: int | None = None,
) -> dict[str, Any]:
    """AP of every detector, over the same images, one at a time; `limit` takes so many, evenly spread.

    Unreadable images are left out and counted.
    """
    for name, detector in detectors.items():
        if detector.num_classes != len(coco.category_ids):
            raise InputError(
                f"the {name.replace('_', ' ')} detector knows {detector.num_classes} classes and the data set has "
                f"{len(coco.category_ids)} categories; give --num-classes and weights that fit"
            )
    every = sorted(coco.images)
    count = min(limit or len(every), len(every))
    chosen = [every[index * len(every) // count] for index in range(count)]
    unreadable: set[int] = set()
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in detectors}
    progress.start("evaluating", len(chosen))
    for done, image_id in enumerate(chosen, 1):
        try:
            image = preprocessing.load(coco.images[image_id].path)
        except UnreadableImage:
            unreadable.add(image_id)
        else:
            padded, size = pad_to([image.pixels]).to(device), (image.pixels.shape[1], image.pixels.shape[2])
            for name, detector in detectors.items():
                found = rescale_and_paste(detector(padded, [size])[0], image.scale_factor, image.original_size)
                parts = (found.boxes, found.scores, found.labels, found.masks)
                results[name] += coco_results(image_id, *parts, coco.category_ids)
        progress.update(done)
    read = [image_id for image_id in chosen if image_id not in unreadable]
    if not read:
        raise InputError(f"none of the {len(chosen)} validation images can be read")
    scores: dict[str, Any] = {name: evaluate_coco(coco, found, read) for name, found in results.items()}
    return scores | {"images": len(read), "unreadable": len(unreadable)}
