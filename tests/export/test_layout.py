"""Moving bytes instead of floats changes the order of operators and no bit of the result."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import timm
import torch

import fimaq
from fimaq.export import onnx_file
from fimaq.export.layout import MOVES, move_bytes_not_floats
from fimaq.export.lower import lower

ARGUMENTS = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 32, "num_heads": 2, "num_classes": 7}


def graph(heads: int, rearranged: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[ir.Model, torch.Tensor]:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **{**ARGUMENTS, "num_heads": heads}).eval()
    images = torch.randn(8, 3, 32, 32)
    quantized = fimaq.quantize(model, images, bits="w4a4", method="rtn", device="cpu").model
    if not rearranged:
        monkeypatch.setattr(onnx_file, "move_bytes_not_floats", lambda graph: None)
    return onnx_file.onnx_model(lower(quantized, images[:2]), images[:2]), images


@pytest.mark.parametrize("heads", [2, 4], ids=["scale is a power of two", "scale is not"])
def test_the_result_is_the_same(heads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for rearranged in (True, False):
        model, images = graph(heads, rearranged, monkeypatch)
        content = ir.to_proto(model).SerializeToString()
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
        results.append(session.run(None, {"images": images.numpy()})[0])
    assert np.array_equal(*results)


def test_what_is_moved_before_a_product_is_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = graph(2, True, monkeypatch)
    for product in (node for node in model.graph if node.op_type == "MatMul"):
        left = product.inputs[0].producer()
        assert left.op_type == "DequantizeLinear"
        source = left.inputs[0].producer()
        assert source.op_type in {"Clip", "QuantizeLinear", "Transpose", "Reshape", "Squeeze", "Unsqueeze"}
    makers = [node.inputs[0].producer() for node in model.graph if node.op_type == "QuantizeLinear"]
    assert all(maker is None or maker.op_type != "Transpose" for maker in makers)
    clips = [node.inputs[0].producer() for node in model.graph if node.op_type == "Clip"]
    assert not MOVES & {maker.op_type for maker in clips}


@pytest.mark.parametrize(
    ("factor", "joined"), [(0.25, True), (2.0, True), (0.3, False), (3.0, False), (-0.5, False), (0.0, False)]
)
def test_a_factor_becomes_part_of_a_scale_where_no_bit_can_change(factor: float, joined: bool) -> None:
    text = f"""
        <ir_version: 10, opset_import: ["" : 21]>
        scaled (float[n, 4] x) => (uint8[n, 4] y)
        <float factor = {{{factor}}}, float scale = {{0.7}}, uint8 zero = {{100}}> {{
            times = Mul (x, factor)
            y = QuantizeLinear (times, scale, zero)
        }}"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    x = np.random.default_rng(0).normal(0, 30, (5000, 4)).astype(np.float32)

    def codes() -> np.ndarray:
        content = ir.to_proto(model).SerializeToString()
        return onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]

    before = codes()
    move_bytes_not_floats(model.graph)
    wanted = ["QuantizeLinear"] if joined else ["Mul", "QuantizeLinear"]
    assert [node.op_type for node in model.graph] == wanted
    assert np.array_equal(codes(), before)
