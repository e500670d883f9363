"""Detectors by name, and what is refused."""

import pytest
import torch
from narrow_detector import NARROW

from fimaq.detection.build import DETECTORS, build_detector
from fimaq.errors import InputError


@pytest.mark.parametrize(
    ("name", "millions"),
    [("mask_rcnn_swin_t", 47.8), ("mask_rcnn_swin_s", 69.1), ("cascade_mask_rcnn_swin_t", 86)],
)
def test_published_numbers_of_parameters(name, millions):
    with torch.device("meta"):
        detector = build_detector(name)
    assert sum(p.numel() for p in detector.parameters()) / 1e6 == pytest.approx(millions, abs=0.5)


@pytest.mark.parametrize("name", DETECTORS)
def test_every_name_builds_in_evaluation_mode(name):
    detector = build_detector(name, 2, NARROW)
    assert not detector.training
    assert detector.num_classes == 2


@pytest.mark.parametrize(
    ("name", "args", "told"),
    [
        ("mask_rcnn_swin_x", {}, "mask_rcnn_swin_t"),
        ("mask_rcnn_swin_t", {"depth": 3}, "depths"),
        ("mask_rcnn_swin_t", {"depths": (2, 2)}, "four"),
        ("mask_rcnn_swin_t", {"embed_dim": "96"}, "whole number"),
        ("mask_rcnn_swin_t", {"embed_dim": 100}, "num_heads"),
        ("mask_rcnn_swin_t", {"box_head": "double"}, "4conv1fc"),
        ("mask_rcnn_swin_t", {"reg_class_agnostic": 3}, "true or false"),
    ],
)
def test_what_cannot_be_built_is_refused_by_name(name, args, told):
    with pytest.raises(InputError, match=told):
        build_detector(name, args=args)


def test_a_detector_has_at_least_one_class():
    with pytest.raises(InputError, match="0 classes"):
        build_detector("mask_rcnn_swin_t", 0)
