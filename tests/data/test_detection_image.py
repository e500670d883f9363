"""What a detector gets to see of an image."""

import numpy as np
import pytest
import torch
from PIL import Image

from fimaq.data.detection_image import MEAN, STD, DetectionPreprocessing, pad_to, pad_to_canvas
from fimaq.errors import InputError


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((640, 480), (1067, 800)),
        ((480, 640), (800, 1067)),
        ((640, 333), (1333, 694)),
        ((1, 1), (800, 800)),
        ((4001, 1), (1333, 1)),
        ((2001, 1501), (1066, 800)),
    ],
)
def test_images_are_resized_by_the_formula_of_mmdetection(tmp_path, size, expected):
    path = tmp_path / "image.png"
    Image.new("RGB", size, (10, 120, 250)).save(path)
    image = DetectionPreprocessing().load(path)
    assert image.pixels.shape == (3, expected[1], expected[0])
    assert image.pixels.dtype == torch.float32
    assert image.scale_factor == (expected[0] / size[0], expected[1] / size[1])
    assert image.original_size == (size[1], size[0])
    flat = [(value - mean) / std for value, mean, std in zip((10, 120, 250), MEAN, STD, strict=True)]
    assert torch.allclose(image.pixels, torch.tensor(flat).view(3, 1, 1).expand_as(image.pixels), atol=1e-5)


@pytest.mark.parametrize("target", [(40, 60), (9, 14)])
def test_resizing_is_bilinear_between_pixel_centres_without_antialiasing(tmp_path, target):
    short, long = target
    pixels = np.random.default_rng(0).integers(0, 256, (21, 31, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    image = DetectionPreprocessing(short, long).load(tmp_path / "image.png")
    _, height, width = image.pixels.shape
    expected = pixels.astype(np.float64)
    for axis, (old, new) in enumerate(((21, height), (31, width))):
        places = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
        below = np.floor(places).astype(int)
        weight = (places - below).reshape((-1, 1, 1) if axis == 0 else (1, -1, 1))
        lower, upper = (np.take(expected, np.minimum(i, old - 1), axis=axis) for i in (below, below + 1))
        expected = lower + weight * (upper - lower)
    got = image.pixels.permute(1, 2, 0).numpy() * np.array(STD) + np.array(MEAN)
    assert np.abs(got - expected).max() < 0.51
    assert np.abs(got - got.round()).max() < 1e-3


def test_batches_are_padded_with_zeros_below_and_right():
    images = [torch.ones(3, 33, 20), torch.ones(3, 31, 65)]
    batch = pad_to(images)
    assert batch.shape == (2, 3, 64, 96)
    assert batch.sum() == sum(image.sum() for image in images)
    assert batch[0, :, :33, :20].all()
    assert batch[1, :, :31, :65].all()
    assert pad_to([torch.ones(3, 64, 32)]).shape == (1, 3, 64, 32)
    assert torch.equal(pad_to_canvas(images, (64, 96)), batch)
    with pytest.raises(InputError, match="31 x 65 does not fit a canvas of 64 x 64"):
        pad_to_canvas(images, (64, 64))


@pytest.mark.parametrize("size", [(64, 48), (48, 64), (300, 20)])
def test_calibration_images_share_a_canvas(size):
    preprocessing = DetectionPreprocessing(60, 100)
    image = Image.effect_noise(size, 80).convert("RGB")
    placed, resized = preprocessing.on_canvas(image), preprocessing.resized(image).pixels
    assert placed.shape == (3, 64, 128)
    height, width = (min(edge, limit) for edge, limit in zip(resized.shape[1:], (64, 128), strict=True))
    assert torch.equal(placed[:, :height, :width], resized[:, :height, :width])
    assert not placed[:, height:].any()
    assert not placed[:, :, width:].any()


def test_it_is_written_down_and_read_back():
    preprocessing = DetectionPreprocessing(256, 320)
    assert DetectionPreprocessing.from_dict(preprocessing.as_dict()) == preprocessing
    with pytest.raises(InputError, match="not a detector's"):
        DetectionPreprocessing.from_dict({"short": 800})
