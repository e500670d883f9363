"""The whole detector, on images of any size."""

import pytest
import torch
from narrow_detector import CLASSES, images, narrow_detector

from fimaq.detection.detections import rescale_and_paste

NAMES = ["mask_rcnn_swin_t", "cascade_mask_rcnn_swin_t"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(75, 53), (64, 96), (17, 130)])
def test_detections_lie_within_their_image_whatever_its_size(name, shape):
    (found,) = narrow_detector(name)(images(*shape), [(shape[0] - 3, shape[1] - 5)])
    assert 0 < len(found) <= 100
    assert found.boxes.min() >= 0
    assert (found.boxes <= torch.tensor([shape[1] - 5, shape[0] - 3] * 2)).all()
    assert (found.boxes[:, 2:] >= found.boxes[:, :2]).all()
    assert torch.equal(found.scores, found.scores.sort(descending=True).values)
    assert found.scores.min() > 0.05
    assert found.labels.dtype == torch.long
    assert set(found.labels.tolist()) <= set(range(CLASSES))
    assert found.masks.shape == (len(found), 28, 28)
    assert 0 <= found.masks.min() <= found.masks.max() <= 1


@pytest.mark.parametrize("name", NAMES)
def test_an_image_is_detected_alike_alone_and_in_a_batch(name):
    detector, batch, sizes = narrow_detector(name), images(64, 96, count=2), [(64, 90), (50, 96)]
    together = detector(batch, sizes)
    for index, size in enumerate(sizes):
        (alone,) = detector(batch[index : index + 1], [size])
        for field in ("boxes", "scores", "labels", "masks"):
            torch.testing.assert_close(getattr(together[index], field), getattr(alone, field))


def test_detections_are_rescaled_to_boxes_and_masks_of_the_original_image():
    (found,) = narrow_detector()(images(64, 96), [(60, 90)])
    original = rescale_and_paste(found, (90 / 270, 60 / 120), (120, 270))
    torch.testing.assert_close(original.boxes, found.boxes * torch.tensor([3.0, 2.0, 3.0, 2.0]))
    assert original.masks.shape == (len(found), 120, 270)
    assert original.masks.dtype == torch.bool


def test_every_region_counts_only_while_it_is_asked_for():
    detector, image = narrow_detector(), images(64, 96)
    detector.roi_head.bbox_head.fc_cls.bias.data[-1] = 1000.0
    assert len(detector(image, [(64, 96)])[0]) == 0
    with detector.every_region_counts():
        detector.roi_head.bbox_head.fc_cls.bias.data[-1] = 100.0
        assert len(detector(image, [(64, 96)])[0]) > 0
    assert len(detector(image, [(64, 96)])[0]) == 0
