"""Image folders and the preprocessing that a model's own data config asks for."""

from fimaq.data.classes import ClassMapping, data_folders, map_classes, validation_set
from fimaq.data.folder import (
    IMAGE_SUFFIXES,
    CalibrationSet,
    ValidationBatch,
    ValidationSet,
    list_images,
    load_calibration,
    validation_batches,
)
from fimaq.data.image import UnreadableImage, load_image
from fimaq.data.preprocess import Preprocessing, Transform, build_transform, resolve_preprocessing
from fimaq.data.share import load_share

__all__ = [
    "IMAGE_SUFFIXES",
    "CalibrationSet",
    "ClassMapping",
    "Preprocessing",
    "Transform",
    "UnreadableImage",
    "ValidationBatch",
    "ValidationSet",
    "build_transform",
    "data_folders",
    "list_images",
    "load_calibration",
    "load_image",
    "load_share",
    "map_classes",
    "resolve_preprocessing",
    "validation_batches",
    "validation_set",
]
