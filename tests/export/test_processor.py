"""Products of bytes on any processor: what may be unsigned times signed, and what says so where it may not."""

import json
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from runs import snapshot
from torch import Tensor, nn

import fimaq
from fimaq.errors import InputError
from fimaq.export import deliver, processor
from fimaq.export.deliver import export_run
from fimaq.export.formats import FORMATS
from fimaq.export.lower import IntegerConv2d, IntegerMatMul, lower
from fimaq.export.processor import cuts_off_sums, largest_signed
from fimaq.progress import Silent


class Overlapping(nn.Module):
    """A convolution whose windows overlap, products of activations in the model's own forward, and a Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.conv(x).flatten(2).transpose(1, 2)
        mixed: Tensor = (tokens @ tokens.transpose(1, 2)).softmax(-1) @ tokens
        return self.head(mixed.mean(1))  # type: ignore[no-any-return]


class Notes(Silent):
    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        self.said.append(text)


def quantized(bits: str, out: Path | None = None) -> tuple[nn.Module, Tensor]:
    """The model and its images."""
    torch.manual_seed(0)
    images = torch.randn(8, 3, 8, 8)
    given: dict[str, Any] = {"bits": bits, "method": "rtn", "device": "cpu", "allow_float": True}
    return fimaq.quantize(Overlapping(), images, out=out, **given).model, images


def pretend_vnni(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine whose processor has it: a file for such processors is made and found good."""
    monkeypatch.setattr(deliver, "cuts_off_sums", lambda: False)
    monkeypatch.setattr(deliver, "shortcomings", lambda *_, **__: [])


def product(left: Tensor, right: Tensor) -> Tensor:
    """By onnxruntime, in integers."""
    kinds = {torch.uint8: TensorProto.UINT8, torch.int8: TensorProto.INT8}
    node = helper.make_node("MatMulInteger", ["left", "right"], ["product"])
    given = [helper.make_tensor_value_info(n, kinds[t.dtype], None) for n, t in (("left", left), ("right", right))]
    result = [helper.make_tensor_value_info("product", TensorProto.INT32, None)]
    graph = helper.make_graph([node], "product", given, result)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"left": left.numpy(), "right": right.numpy()})[0])


@pytest.mark.parametrize("levels", [255, 127, 31])
@pytest.mark.parametrize("sign", [-1, 1])
def test_signed_codes_that_are_small_enough_are_multiplied_exactly(levels: int, sign: int) -> None:
    left = torch.full((3, 64), levels, dtype=torch.uint8)
    right = torch.full((64, 32), sign * min(largest_signed(levels), 127), dtype=torch.int8)
    assert torch.equal(product(left, right).long(), left.long() @ right.long())


def test_unsigned_codes_are_multiplied_exactly() -> None:
    left, right = (torch.full(shape, 255, dtype=torch.uint8) for shape in ((3, 64), (64, 32)))
    assert torch.equal(product(left, right).long(), left.long() @ right.long())


@pytest.mark.parametrize(
    ("bits", "kind"), [("w8a8", torch.uint8), ("w7a7", torch.int8), ("w6a5", torch.int8), ("w4a4", torch.int8)]
)
def test_no_product_of_an_onnx_file_can_be_cut_off(bits: str, kind: torch.dtype) -> None:
    model, images = quantized(bits)
    expected = model(images)
    lowered = lower(model, images[:2])
    torch.testing.assert_close(lowered(images), expected)
    assert lowered.head.integers.codes.dtype == kind
    for module in lowered.modules():
        if isinstance(module, IntegerMatMul):
            assert module.right.zero_point.dtype == kind
        if isinstance(module, IntegerConv2d):
            assert all(part.abs().max() <= largest_signed(module.input_quantizer.levels) for part in module.parts)


def test_for_vnni_all_right_sides_are_signed_and_no_weight_is_divided_for_nothing() -> None:
    model, images = quantized("w8a8")
    expected = model(images)
    steps = model.conv.codes.int() - model.conv.weight_quantizer.zero_point.int()
    lowered = lower(model, images[:2], processor="vnni")
    torch.testing.assert_close(lowered(images), expected)
    assert lowered.head.integers.codes.dtype == torch.int8
    rights = [module.right for module in lowered.modules() if isinstance(module, IntegerMatMul)]
    assert {right.zero_point.dtype for right in rights} == {torch.int8}
    assert len(lowered.conv.parts) == (1 if steps.min() >= -128 and steps.max() <= 127 else 2)


def test_a_file_for_vnni_says_so_and_holds_what_the_run_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_vnni(monkeypatch)
    own, images = quantized("w8a8", tmp_path / "run")
    notes = Notes()
    export_run(tmp_path / "run", {"test": images}, model=Overlapping(), progress=notes, processor="vnni")
    assert json.loads((tmp_path / "run" / "export.json").read_text())["processor"] == "vnni"
    assert not any("--processor" in text for text in notes.said)
    file = onnx.load(tmp_path / "run" / "model.onnx")
    assert {entry.key: entry.value for entry in file.metadata_props}["fimaq.processor"] == "vnni"
    kinds = {tensor.data_type for tensor in file.graph.initializer if len(tensor.dims) > 1}
    assert TensorProto.INT8 in kinds
    assert TensorProto.UINT8 not in kinds
    # Not as this machine's processor multiplies bytes, but in numpy, as the file is written.
    computed = onnx.reference.ReferenceEvaluator(file).run(["logits"], {"images": images.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(computed), own(images))


@pytest.mark.parametrize(("bits", "matters"), [("w8a8", True), ("w4a4", False)])
def test_a_file_for_any_processor_mentions_vnni_where_it_would_be_faster(
    bits: str, matters: bool, tmp_path: Path
) -> None:
    images, notes = quantized(bits, tmp_path / "run")[1], Notes()
    record = export_run(tmp_path / "run", {"test": images}, model=Overlapping(), progress=notes)
    assert record["processor"] == "any"
    assert sum("--processor vnni" in text for text in notes.said) == matters
    assert not onnx.load(tmp_path / "run" / "model.onnx").metadata_props


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"processor": "vnni"}, "'vnni': this processor has no VNNI, .* with --processor any, or on a processor"),
        ({"processor": "vnni", "format": "openvino"}, "'vnni' is for format onnx"),
        ({"processor": "npu"}, "'npu' is not known; accepted are any, vnni"),
    ],
)
def test_what_cannot_be_made_or_verified_is_refused_before_the_run_is_loaded(
    asked: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = quantized("w4a4", tmp_path / "run")[1]
    before = snapshot(tmp_path)
    monkeypatch.setattr(deliver, "cuts_off_sums", lambda: True)
    monkeypatch.delattr(deliver, "load")
    with pytest.raises(InputError, match=message):
        export_run(tmp_path / "run", {"test": images}, model=Overlapping(), **asked)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("machine", "flags", "cut"),
    [
        ("x86_64", "fpu avx2 fma", True),
        ("x86_64", "fpu avx2 avx512f avx512_vnni", False),
        ("x86_64", "fpu avx2 avx_vnni", False),
        ("x86_64", "", False),
        ("aarch64", "fp asimd", False),
    ],
)
def test_processors_without_vnni_are_known(
    machine: str, flags: str, cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor.platform, "machine", lambda: machine)
    monkeypatch.setattr(Path, "read_text", lambda path: f"processor\t: 0\nflags\t\t: {flags}\n")
    assert cuts_off_sums() == cut


def test_openvino_is_said_to_be_the_reason_where_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliver, "cuts_off_sums", lambda: True)
    assert "no VNNI" in deliver._hint(FORMATS["openvino"])
    assert deliver._hint(FORMATS["onnx"]) == ""
