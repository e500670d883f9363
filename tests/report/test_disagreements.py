"""Which images are shown, and that they are the images."""

import base64
import io

import numpy as np
import torch
from PIL import Image

from fimaq.data.preprocess import Preprocessing
from fimaq.report.disagreements import SIDE, Disagreements, class_names, picture_of


def pixels_of(uri: str) -> np.ndarray:
    kind, _, content = uri.partition(",")
    assert kind == "data:image/jpeg;base64"
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(content))))


def test_only_disagreements_are_kept_those_first_that_surprise_most() -> None:
    full = torch.tensor([[4.0, 0.0], [9.0, 0.0], [1.0, 0.0], [0.0, 3.0]])
    quantized = torch.tensor([[0.0, 4.0], [0.0, 9.0], [1.0, 0.0], [3.0, 0.0]])
    found = Disagreements(None, most=2)
    found.add(torch.rand(4, 1, 8, 8), full, quantized, torch.tensor([0, 1, 0, 1]))
    assert (found.images, found.count) == (4, 3)
    assert [item.full[0] for item in found.worst] == [0, 0]
    assert [item.target for item in found.worst] == [1, 0]
    assert found.worst[0].full[1] > found.worst[1].full[1]


def test_a_picture_undoes_the_normalisation() -> None:
    preprocessing = Preprocessing((3, 224, 224), (0.5, 0.4, 0.3), (0.2, 0.25, 0.3))
    colour = torch.tensor([200, 100, 50]) / 255
    mean, std = torch.tensor(preprocessing.mean), torch.tensor(preprocessing.std)
    image = ((colour - mean) / std).view(3, 1, 1).expand(3, 224, 224)
    pixels = pixels_of(picture_of(image, preprocessing))
    assert pixels.shape == (SIDE, SIDE, 3)
    assert np.abs(pixels.astype(int) - [200, 100, 50]).max() <= 3


def test_grey_images_without_preprocessing_are_stretched_to_their_extremes() -> None:
    image = torch.linspace(-1, 1, 64).view(1, 8, 8)
    pixels = pixels_of(picture_of(image, None))
    assert pixels.shape == (8, 8, 3)
    assert pixels.min() < 20
    assert pixels.max() > 235


def test_class_names_are_the_models_or_imagenets_or_those_of_folders() -> None:
    assert class_names(2, ["cat", "dog"]) == {0: "cat", 1: "dog"}
    assert class_names(1000)[0].startswith("tench")
    assert class_names(1000, None, {"n01440764": 0})[0].startswith("tench")
    assert class_names(1000, None, {"Fiat 500": 0, "Saab 900": 1}) == {0: "Fiat 500", 1: "Saab 900"}
    assert class_names(3, None, {"ant": 2}) == {2: "ant"}
    assert class_names(None) == {}
