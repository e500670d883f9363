"""A run becomes a file that was verified, or nothing."""

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
from runs import snapshot

import fimaq
from fimaq.artifact.files import FileLock
from fimaq.data.demo import demo_calibration, demo_model, demo_test
from fimaq.errors import FimaqError, InputError
from fimaq.export import deliver, verify
from fimaq.export.deliver import export_run
from fimaq.export.formats import FORMATS
from fimaq.export.sessions import OnnxRuntimeSession


def quantized(folder: Path, **settings: Any) -> Path:
    torch.set_num_threads(1)
    given = {"bits": "w4a4", "method": "rtn", "device": "cpu", **settings}
    fimaq.quantize(demo_model(), demo_calibration(64), out=folder / "run", **given)
    return folder / "run"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = quantized(tmp_path_factory.mktemp("exported"))
    export_run(run, {"test": demo_test()[0][:100]}, model=demo_model())
    return run


def logits(path: Path, images: torch.Tensor) -> torch.Tensor:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])


@pytest.mark.parametrize("count", [1, 2, 7])
@torch.no_grad()
def test_the_file_gives_what_the_run_gives_for_any_number_of_images(exported: Path, count: int) -> None:
    images = demo_test()[0][:count]
    own = fimaq.load(exported, demo_model())(images)
    torch.testing.assert_close(logits(exported / "model.onnx", images), own, rtol=1e-3, atol=1e-3)


def test_what_was_found_is_recorded_beside_the_file(exported: Path) -> None:
    record = json.loads((exported / "export.json").read_text())
    found = record["verification"]
    assert found["integer_products"] == record["quantized_products"] > 20
    assert found["float_products"] == {}
    assert found["agreement"]["test"]["images"] == 100
    assert found["agreement"]["test"]["same_top1"] >= 99
    assert record["input"]["name"] == "images"
    assert record["input"]["shape"] == ["batch", 1, 16, 16]
    assert record["bytes"] == (exported / "model.onnx").stat().st_size


def test_four_bit_weights_are_stored_in_four_bits(exported: Path) -> None:
    model = onnx.load(exported / "model.onnx")
    kinds = {onnx.TensorProto.DataType.Name(tensor.data_type) for tensor in model.graph.initializer}
    weights = [t for t in model.graph.initializer if t.data_type == onnx.TensorProto.INT4]
    state = fimaq.load(exported, demo_model())
    assert "INT4" in kinds
    assert sum(np.prod(t.dims) for t in weights) == sum(
        m.codes.numel() for m in state.modules() if isinstance(getattr(m, "codes", None), torch.Tensor)
    )
    assert all(len(t.raw_data) <= np.prod(t.dims) / 2 + 1 for t in weights)


@pytest.mark.parametrize("bits", ["w8a8", "w3a3", "w6a5"])
def test_other_bit_widths_are_exported_too(bits: str, tmp_path: Path) -> None:
    run = quantized(tmp_path, bits=bits)
    (tmp_path / ".other.onnx.export" / "other.onnx").mkdir(parents=True)  # what a kill leaves
    record = export_run(run, {"test": demo_test()[0][:100]}, out=tmp_path / "other.onnx", model=demo_model())
    assert record["verification"]["agreement"]["test"]["same_top1"] >= 98
    assert {path.name for path in tmp_path.iterdir()} == {"run", "other.onnx", "other.export.json"}
    assert not (run / "model.onnx").exists()


def test_two_exports_to_one_name_do_not_go_side_by_side(exported: Path) -> None:
    lock = FileLock(exported / ".model.onnx.lock", "a test")
    with pytest.raises(InputError, match=r"model\.onnx is in use"):
        export_run(exported, {"test": demo_test()[0][:4]}, model=demo_model())
    lock.release(remove=True)


def test_a_runtime_installed_under_another_name_has_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    assert FORMATS["onnx"].version == f"onnxruntime {onnxruntime.__version__}"


def test_scales_per_token_are_refused_with_the_preset_to_use(tmp_path: Path) -> None:
    run = quantized(tmp_path, preset="released")
    before = snapshot(run)
    with pytest.raises(InputError, match=r"scales for one activation, .*--preset deploy"):
        export_run(run, {"test": demo_test()[0][:4]}, model=demo_model())
    assert snapshot(run) == before


def test_a_file_that_disagrees_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = quantized(tmp_path)
    before = snapshot(run)
    disagreeing = {"images": 100, "same_top1": 90, "same_top1_of_the_run_with_itself": 100}
    monkeypatch.setattr(verify, "_compare", lambda *_: disagreeing)
    with pytest.raises(FimaqError, match=r"not kept: same top-1 as the run on 90 of 100 images \(test\)"):
        export_run(run, {"test": demo_test()[0][:4]}, model=demo_model())
    assert snapshot(run) == before


def test_a_file_with_products_in_float_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = quantized(tmp_path)
    monkeypatch.setattr(OnnxRuntimeSession, "integer_kinds", ("QLinearMatMul",))
    monkeypatch.setattr(OnnxRuntimeSession, "float_kinds", ("MatMulIntegerToFloat",))
    with pytest.raises(FimaqError, match=r"0 of \d+ quantized products run in integer; products in float"):
        export_run(run, {"test": demo_test()[0][:4]}, model=demo_model())
    assert not (run / "model.onnx").exists()


def test_an_interrupted_export_leaves_what_was_there(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot(exported)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(deliver, "verify", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export_run(exported, {"test": demo_test()[0][:4]}, model=demo_model())
    assert snapshot(exported) == before


def test_nothing_to_verify_on_is_an_error(exported: Path) -> None:
    with pytest.raises(InputError, match="verified on images, and none were given"):
        export_run(exported, {"test": demo_test()[0][:0]}, model=demo_model())


@pytest.mark.parametrize("out", ["missing/model.onnx", "."])
def test_a_place_that_cannot_be_written_is_refused(exported: Path, tmp_path: Path, out: str) -> None:
    with pytest.raises(InputError, match="give --out a file in a folder that exists"):
        export_run(exported, {"test": demo_test()[0][:4]}, out=tmp_path / out, model=demo_model())


def test_the_file_that_is_opened_gets_its_place_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill in between leaves a file of weights too many, but no network without its weights."""
    places: list[Path] = []
    monkeypatch.setattr(Path, "replace", lambda self, target: places.append(target))
    (tmp_path / "made").mkdir()
    names = ["a.bin", "c.bin", "b.xml"]
    for name in names:
        (tmp_path / "made" / name).touch()
    deliver._move(tmp_path / "made", tmp_path / "b.xml")
    assert places == [tmp_path / name for name in names]


def test_a_model_that_takes_any_size_gives_a_file_that_does(tmp_path: Path) -> None:
    def vit() -> torch.nn.Module:
        torch.manual_seed(0)
        small = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 48, "num_heads": 3, "num_classes": 10}
        return timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True, **small)

    images = torch.randn(16, 3, 32, 32)
    fimaq.quantize(vit(), images, out=tmp_path / "run", bits="w4a4", method="rtn", batch_size=8, device="cpu")
    record = export_run(tmp_path / "run", {"test": images}, model=vit())
    assert record["input"]["shape"] == ["batch", 3, "height", "width"]
    assert record["input"]["multiples"] == (8, 8)
    assert record["verification"]["agreement"]["another size"]["images"] == 16
    own = fimaq.load(tmp_path / "run", vit())
    for size in ((32, 32), (24, 40), (64, 16)):
        other = torch.randn(3, 3, *size)
        torch.testing.assert_close(
            logits(tmp_path / "run" / "model.onnx", other), own(other), rtol=1e-3, atol=1e-3
        )


@pytest.mark.parametrize("format", ["onnx", "openvino"])
def test_divided_channels_are_exported(format: str, tmp_path: Path) -> None:
    def massive() -> torch.nn.Module:
        model = demo_model()
        hidden = model.blocks[1].mlp
        hidden.fc1.weight.data[5] *= 40
        hidden.fc2.weight.data[:, 5] /= 40
        return model

    images = demo_test()[0][:100]
    given = {"bits": "w6a6", "method": "rtn", "device": "cpu"}
    run = fimaq.quantize(massive(), demo_calibration(64), out=tmp_path / "run", **given)
    assert run.model.blocks[1].mlp.fc2.divided
    record = export_run(tmp_path / "run", {"test": images}, model=massive(), format=format)
    assert record["verification"]["agreement"]["test"]["same_top1"] >= 98
    assert record["processor"] == {"onnx": "any", "openvino": None}[format]
