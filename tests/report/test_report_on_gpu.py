"""A report made on a GPU says what one made on a CPU says."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fimaq.models.prepare import Structure
from fimaq.report.sensitivity import Sensitivity, measure_sensitivity
from fimaq.report.twin import full_precision_twin
from fimaq.report.write import write_report

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch sees no CUDA GPU"),
]


def measured(
    device: str, original: nn.Module, quantized: nn.Module, structure: Structure, images: Tensor
) -> Sensitivity:
    original, quantized = original.to(device), quantized.to(device)
    twin = full_precision_twin(original, quantized, structure, images[:2].to(device))
    return measure_sensitivity(twin, quantized, structure, images)


def test_sensitivity_is_the_same_on_both(
    original: nn.Module, quantized: nn.Module, structure: Structure, images: Tensor
) -> None:
    one, two = (measured(device, original, quantized, structure, images) for device in ("cpu", "cuda"))
    assert [unit.kl for unit in two.units] == pytest.approx([unit.kl for unit in one.units], rel=0.1, abs=1e-4)
    own = [[layer.own.decibels for layer in found.layers] for found in (one, two)]
    assert own[1] == pytest.approx(own[0], abs=0.2)


def test_a_whole_report_is_written(demo_run: Path, original: nn.Module, images: Tensor, tmp_path: Path) -> None:
    out = write_report(demo_run, tmp_path / "r.html", model=original, images=images, device="cuda")
    assert "images given in Python" in out.read_text()
