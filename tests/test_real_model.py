"""A real trained model on real images: preprocessing, class mapping and ranges together."""

from pathlib import Path

import pytest
import torch

import fimaq
from fimaq.accuracy import evaluate_models
from fimaq.data import build_transform, load_calibration, resolve_preprocessing, validation_set
from fimaq.models.build import build_model

pytestmark = pytest.mark.shared


def test_vit_tiny_in_8_bits_answers_as_in_full_precision(shared: Path) -> None:
    model = build_model("vit_tiny_patch16_224", shared / "weights" / "vit_tiny_patch16_224.safetensors")
    transform = build_transform(resolve_preprocessing(model, crop_pct=1.0))
    calibration = load_calibration(shared / "imagenet-subset" / "train", 8, transform, seed=0)
    dataset, mapping = validation_set(shared / "imagenet-subset" / "val", 1000, transform, limit=100)
    run = fimaq.quantize(model, calibration.images, bits="w8a8", method="rtn")
    models = {"full_precision": model, "quantized": run.model}
    result = evaluate_models(models, dataset, 50, torch.device("cpu"))
    assert "synset" in mapping.source
    assert result["images"] == 100
    assert 65 <= result["full_precision"]["top1"] <= 90
    assert result["agreement"] >= 80
    assert result["kl_divergence"] < 0.2
