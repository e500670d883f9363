import json

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn
from torchvision.transforms import functional as F

from fimaq.data import Preprocessing, build_transform, resolve_preprocessing
from fimaq.errors import InputError

HALF = (0.5, 0.5, 0.5)


def noise_image(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def vit() -> nn.Module:
    with torch.device("meta"):
        return timm.create_model("vit_tiny_patch16_224")


def test_the_models_own_data_config_is_used(vit):
    resolved = resolve_preprocessing(vit)
    assert resolved == Preprocessing((3, 224, 224), HALF, HALF, "bicubic", 0.9, "center")


def test_given_values_win_over_the_models(vit):
    resolved = resolve_preprocessing(vit, crop_pct=1.0, mean=[0.1, 0.2, 0.3], interpolation="bilinear")
    assert (resolved.crop_pct, resolved.mean, resolved.interpolation) == (1.0, (0.1, 0.2, 0.3), "bilinear")
    assert resolved.std == HALF


def test_a_plain_module_gets_timms_defaults():
    resolved = resolve_preprocessing(nn.Linear(2, 2))
    assert resolved.input_size == (3, 224, 224)
    assert resolved.mean == timm.data.IMAGENET_DEFAULT_MEAN


def test_a_model_created_with_another_image_size_is_fed_that_size():
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", img_size=96)
    assert resolve_preprocessing(model).input_size == (3, 96, 96)


def test_a_model_that_is_not_rgb_is_refused():
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", in_chans=1)
    with pytest.raises(InputError, match=r"\(1, 224, 224\).*RGB"):
        resolve_preprocessing(model)


@pytest.mark.parametrize("size", [(32, 32), (48, 32)], ids=["square", "oblong"])
def test_an_image_of_the_input_size_is_not_resampled_without_crop(size):
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    image = noise_image(*size)
    transform = build_transform(Preprocessing((3, size[1], size[0]), mean, std, "bicubic", crop_pct=1.0))
    expected = F.normalize(F.to_tensor(image), mean, std)
    assert torch.equal(transform(image), expected)


def test_the_crop_keeps_the_centre():
    image = noise_image(40, 40)
    transform = build_transform(Preprocessing((3, 32, 32), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), crop_pct=0.8))
    assert torch.equal(transform(image), F.to_tensor(image)[:, 4:36, 4:36])


def test_any_image_size_becomes_the_input_size():
    transform = build_transform(Preprocessing((3, 32, 32), HALF, HALF, crop_pct=0.9))
    assert transform(noise_image(7, 90)).shape == (3, 32, 32)


def test_preprocessing_survives_json():
    original = Preprocessing((3, 224, 224), HALF, (0.2, 0.3, 0.4), "bilinear", 0.875, "squash")
    assert Preprocessing.from_dict(json.loads(json.dumps(original.as_dict()))) == original


def test_an_unknown_key_is_named():
    values = Preprocessing((3, 8, 8), HALF, HALF).as_dict() | {"croppct": 0.9}
    with pytest.raises(InputError, match="croppct"):
        Preprocessing.from_dict(values)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("crop_pct", 1.5),
        ("crop_pct", 0.0),
        ("std", (0.5, 0.0, 0.5)),
        ("mean", (0.5,)),
        ("interpolation", "cubic"),
    ],
)
def test_impossible_values_are_named(vit, name, value):
    with pytest.raises(InputError, match=name):
        resolve_preprocessing(vit, **{name: value})


def test_the_description_is_one_readable_line():
    described = Preprocessing((3, 224, 224), HALF, (0.229, 0.224, 0.225)).describe()
    assert described == "3x224x224, bicubic, crop_pct 1.0, mean (0.5, 0.5, 0.5), std (0.229, 0.224, 0.225)"
