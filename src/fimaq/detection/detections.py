"""What a detector finds in one image, and how it is carried back to the image as it was before resizing."""

from dataclasses import dataclass

from torch import Tensor

from fimaq.detection.masks import paste_masks


@dataclass(frozen=True)
class Detections:
    """k detections of one image, best first."""

    boxes: Tensor  # (k, 4): x1, y1, x2, y2 in pixels
    scores: Tensor  # (k,) in (0, 1]
    labels: Tensor  # (k,) int, from 0
    masks: Tensor  # (k, 28, 28) probabilities over the box; once pasted, (k, height, width) bool

    def __len__(self) -> int:
        return len(self.boxes)


def rescale_and_paste(
    detections: Detections, scale_factor: tuple[float, float], original_size: tuple[int, int]
) -> Detections:
    """Detections in pixels of the original image (height, width), with masks of its size.

    `scale_factor` is (width, height) of the resized image over that of the original.
    """
    boxes = detections.boxes / detections.boxes.new_tensor([*scale_factor, *scale_factor])
    masks = paste_masks(detections.masks, boxes, original_size)
    return Detections(boxes, detections.scores, detections.labels, masks)
