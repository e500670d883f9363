"""The embedded demo model and digits: complete, small, and honest about what was held out."""

from importlib.resources import files

import pytest
import torch

from fimaq.data.demo import demo_calibration, demo_model, demo_test


def test_the_embedded_model_classifies_the_held_out_digits() -> None:
    images, labels = demo_test()
    with torch.no_grad():
        predictions = demo_model()(images).argmax(dim=1)
    assert (predictions == labels).float().mean() >= 0.96


def test_the_model_comes_in_float32_and_eval_mode() -> None:
    model = demo_model()
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_calibration_and_test_images_are_disjoint() -> None:
    calibration = {image.numpy().tobytes() for image in demo_calibration(1000)}
    test = {image.numpy().tobytes() for image in demo_test()[0]}
    assert not calibration & test


def test_shapes_and_ranges() -> None:
    images, labels = demo_test()
    assert images.shape == (797, 1, 16, 16)
    assert labels.unique().tolist() == list(range(10))
    assert demo_calibration(32).shape == (32, 1, 16, 16)
    assert images.min() == -1
    assert images.max() <= 1


@pytest.mark.parametrize("n", [0, 1001])
def test_asking_for_images_the_demo_does_not_hold_names_the_limit(n: int) -> None:
    with pytest.raises(ValueError, match="1 to 1000"):
        demo_calibration(n)


@pytest.mark.parametrize(("name", "limit"), [("vit_digits.safetensors", 700_000), ("digits.safetensors", 200_000)])
def test_the_embedded_files_stay_small(name: str, limit: int) -> None:
    assert len(files("fimaq.data.demo").joinpath(name).read_bytes()) < limit
