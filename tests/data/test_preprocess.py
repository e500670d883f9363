import json
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn
from torchvision.transforms import functional as F

from fimaq.data import Preprocessing, build_transform, resolve_preprocessing
from fimaq.data.preprocess import stated_preprocessing
from fimaq.errors import InputError

HALF = (0.5, 0.5, 0.5)
ZERO, ONE = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
SIZES = ((30, 30), (30, 45), (20, 30))


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


@pytest.mark.parametrize("name", ["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"])
def test_pixels_are_those_of_the_interpolation_named_at_the_height_and_width_named(name):
    image = noise_image(60, 90)
    transform = build_transform(Preprocessing((3, 48, 32), ZERO, ONE, name))
    assert torch.equal(transform(image), F.to_tensor(image.resize((32, 48), Image.Resampling[name.upper()])))


def test_crop_modes_squash_cut_or_frame_an_oblong_image():
    image = noise_image(60, 90)
    squashed, cut, framed = (
        build_transform(Preprocessing((3, 30, 30), ZERO, ONE, "bilinear", 1.0, mode))(image)
        for mode in ("squash", "center", "border")
    )
    resized = {size: F.to_tensor(image.resize(size, Image.Resampling.BILINEAR)) for size in SIZES}
    assert torch.equal(squashed, resized[30, 30])
    assert torch.equal(cut, resized[30, 45][:, 8:38])
    assert torch.equal(framed[:, :, 5:25], resized[20, 30])
    assert len({*framed[:, :, :5].unique().tolist(), *framed[:, :, 25:].unique().tolist()}) == 1


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


def test_images_are_said_to_be_the_models_own_but_for_what_is_given(vit):
    images = torch.rand(2, 3, 224, 224) * 2 - 1
    own = resolve_preprocessing(vit)
    assert stated_preprocessing(vit, images, None) == own
    assert stated_preprocessing(vit, images, {"crop_pct": 1.0}) == replace(own, crop_pct=1.0)
    assert stated_preprocessing(vit, images, timm.data.resolve_model_data_config(vit)) == own
    assert stated_preprocessing(vit, images[..., :96, :64], None).input_size == (3, 96, 64)


def test_nothing_is_said_of_images_that_are_not_rgb(vit):
    assert stated_preprocessing(vit, torch.rand(2, 1, 32, 32), None) is None
    with pytest.raises(InputError, match="only RGB"):
        stated_preprocessing(vit, torch.rand(2, 1, 32, 32), {"crop_pct": 1.0})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"croppct": 1.0}, "check croppct"),
        ({"input_size": (3, 96, 96)}, r"gives images of \(3, 96, 96\), and those given are \(3, 224, 224\)"),
        ({"mean": ZERO, "std": ONE}, "would lie between -1.00 and 1.00 instead of 0 and 1"),
        ({"std": (50.0, 50.0, 50.0)}, "would lie between -49.50 and 50.50"),
        ("imagenet", "give a dictionary"),
    ],
)
def test_what_cannot_have_made_the_images_is_refused(vit, given, said):
    images = torch.rand(2, 3, 224, 224) * 2 - 1
    images[0, :, 0, 0], images[1, :, 0, 0] = -1.0, 1.0
    with pytest.raises(InputError, match=said):
        stated_preprocessing(vit, images, given)
