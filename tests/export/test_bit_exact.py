"""A run made with bit_exact gives the same bits in PyTorch and in onnxruntime."""

from pathlib import Path

import pytest
import torch

import fimaq
from fimaq.data.demo import demo_calibration, demo_model, demo_test
from fimaq.errors import InputError
from fimaq.export.deliver import export_run
from fimaq.export.sessions import OnnxRuntimeSession

SETTINGS = {"bit_exact": True, "device": "cpu", "iters": 3, "batch_size": 16, "search_size": 16}


@pytest.fixture(scope="module", params=["w3a3", "w8a8"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> fimaq.Run:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp(request.param) / "run"
    return fimaq.quantize(demo_model(), demo_calibration(64), out=out, bits=request.param, **SETTINGS)


@torch.no_grad()
def test_the_file_gives_the_bits_of_the_run(run: fimaq.Run) -> None:
    assert run.path is not None
    images = demo_test()[0][:300]
    export_run(run.path, {"test": images[:50]}, model=demo_model())
    file = OnnxRuntimeSession(run.path / "model.onnx")(images)
    assert (file == run.model(images)).all(1).float().mean() >= 0.97


def test_a_runtime_that_does_not_keep_steps_apart_is_refused(run: fimaq.Run) -> None:
    assert run.path is not None
    with pytest.raises(InputError, match="--format onnx"):
        export_run(run.path, {"test": demo_test()[0][:4]}, model=demo_model(), format="openvino")


@torch.no_grad()
def test_it_is_stored_with_the_run(run: fimaq.Run) -> None:
    assert run.path is not None
    images = demo_test()[0][:50]
    assert torch.equal(fimaq.load(run.path, demo_model())(images), run.model(images))


@torch.no_grad()
def test_a_finished_run_is_given_back_with_it(run: fimaq.Run) -> None:
    bits = run.config.bits
    again = fimaq.quantize(demo_model(), demo_calibration(64), out=run.path, resume=True, bits=bits, **SETTINGS)
    images = demo_test()[0][:50]
    assert torch.equal(again.model(images), run.model(images))


def test_with_a_scale_per_token_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="bit_exact"):
        fimaq.quantize(demo_model(), demo_calibration(32), preset="released", bit_exact=True, out=tmp_path / "run")
