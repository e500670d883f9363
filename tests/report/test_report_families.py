"""Every family of timm transformers has a twin, and its units are measured."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from families import FAMILIES
from torch import nn

import fimaq
from fimaq.artifact.run_directory import RunDirectory
from fimaq.report.material import structure_of
from fimaq.report.sensitivity import measure_sensitivity
from fimaq.report.twin import full_precision_twin

QUICK = {("beit", "deploy"), ("cait", "deploy"), ("deit_distilled", "deploy"), ("vit", "released")}
"""Bias put together by the model, class attention, two heads, ranges per token; the others take a minute."""
CASES = [
    pytest.param(family, preset, marks=[] if (family, preset) in QUICK else [pytest.mark.slow])
    for family in FAMILIES
    for preset in ("deploy", "released")
    if preset == "deploy" or family in ("vit", "swin", "cait")
]


@pytest.mark.parametrize(("family", "preset"), CASES)
@torch.no_grad()
def test_units_of_a_family_are_measured(
    family: str, preset: str, noisy_model: Callable[..., nn.Module], tmp_path: Path
) -> None:
    name, arguments = FAMILIES[family]
    images = torch.randn(4, 3, arguments["img_size"], arguments["img_size"])
    model = noisy_model(name, **arguments)
    settings = {"bits": "w4a4", "method": "rtn", "batch_size": 4, "device": "cpu", "preset": preset}
    fimaq.quantize(model, images, out=tmp_path, **settings)
    quantized = fimaq.load(tmp_path, model=model)
    structure = structure_of(RunDirectory.open_existing(tmp_path))
    twin = full_precision_twin(model, quantized, structure, images[:1])
    found = measure_sensitivity(twin, quantized, structure, images)
    assert len(found.layers) == len(structure.layers) + sum(count for count, _ in structure.products.values())
    assert all(unit.kl > 0 for unit in found.units)
    teacher, logits = model(images).double(), quantized(images).double()
    expected = nn.functional.kl_div(logits.log_softmax(-1), teacher.softmax(-1), reduction="none").sum(-1).mean()
    assert found.whole.kl == pytest.approx(float(expected), rel=0.05, abs=1e-6)
