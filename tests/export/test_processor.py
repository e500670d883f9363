"""Products of bytes on any processor: what may be unsigned times signed, and what says so where it may not."""

from pathlib import Path

import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

import fimaq
from fimaq.export import deliver, processor
from fimaq.export.formats import FORMATS
from fimaq.export.lower import IntegerConv2d, IntegerMatMul, lower
from fimaq.export.processor import cuts_off_sums, largest_signed


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
    class Overlapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            tokens = self.conv(x).flatten(2).transpose(1, 2)
            mixed: Tensor = (tokens @ tokens.transpose(1, 2)).softmax(-1) @ tokens
            return self.head(mixed.mean(1))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    images = torch.randn(8, 3, 8, 8)
    model = fimaq.quantize(Overlapping(), images, bits=bits, method="rtn", device="cpu", allow_float=True).model
    expected = model(images)
    lowered = lower(model, images[:2])
    torch.testing.assert_close(lowered(images), expected)
    assert lowered.head.integers.codes.dtype == kind
    for module in lowered.modules():
        if isinstance(module, IntegerMatMul):
            assert module.right.zero_point.dtype == kind
        if isinstance(module, IntegerConv2d):
            assert all(part.abs().max() <= largest_signed(module.input_quantizer.levels) for part in module.parts)


@pytest.mark.parametrize(
    ("machine", "flags", "cut"),
    [
        ("x86_64", "fpu avx2 fma", True),
        ("x86_64", "fpu avx2 avx512f avx512_vnni", False),
        ("x86_64", "fpu avx2 avx_vnni", False),
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
