"""What tests of a report start from: a finished run of the embedded demo model, and its original weights."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fimaq
from fimaq.artifact.run_directory import RunDirectory
from fimaq.data.demo import demo_calibration, demo_model
from fimaq.models.prepare import Structure
from fimaq.report.material import structure_of

SETTINGS = {"bits": "w3a3", "iters": 4, "batch_size": 16, "search_size": 16, "calib_size": 32, "device": "cpu"}


@pytest.fixture(scope="session")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For tests that leave it as it is."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("runs") / "demo"
    fimaq.quantize(demo_model(), demo_calibration(32), out=out, **SETTINGS)
    return out


@pytest.fixture
def original() -> nn.Module:
    return demo_model().requires_grad_(False)


@pytest.fixture
def quantized(demo_run: Path, original: nn.Module) -> nn.Module:
    return fimaq.load(demo_run, model=original)


@pytest.fixture
def structure(demo_run: Path) -> Structure:
    return structure_of(RunDirectory.open_existing(demo_run))


@pytest.fixture(scope="session")
def images() -> Tensor:
    """(20, 1, 16, 16): more than one batch, the last one not full."""
    return demo_calibration(20)
