"""A lowered model as an OpenVINO file: model.xml with model.bin beside it.

The way leads through ONNX, which OpenVINO reads. Its CPU plugin multiplies integers fast where weights lie as
(out, in) and neither they nor the operands of attention have zero points; `lower(symmetric=True)` sees to that.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import openvino
from torch import Tensor, nn

from fimaq.export.onnx_file import op, translate, window
from fimaq.export.sessions import openvino_core


def write(
    model: nn.Module, example: Tensor, path: Path, lowered: bool, step: None = None, processor: str = "any"
) -> None:
    """The number of images is left open, their size is the example's. `processor` makes no difference here."""
    translated = translate(model, example, quantize=_quantize, convolve=_convolve)
    if lowered:
        _weights_by_output(translated.graph)
    content = ir.to_proto(translated).SerializeToString()
    openvino.save_model(openvino_core().read_model(content), str(path), compress_to_fp16=False)


def _quantize(x: Any, scale: Any, zero_point: Any, low: int, high: int) -> Any:
    """Whole numbers of steps by operators of their own; QuantizeLinear then only makes bytes of them.

    x is clipped before it is divided: what OpenVINO finds between two multiplications it leaves where it is, and a
    LayerNorm's weights would otherwise be multiplied by 1 / scale, which rounds anew.
    """
    zero = op.CastLike(zero_point, scale)
    limits = [op.Mul(op.Sub(op.Constant(value_float=float(limit)), zero), scale) for limit in (low, high)]
    steps = op.Round(op.Div(op.Clip(x, *limits), scale))
    return op.QuantizeLinear(steps, op.Constant(value_float=1.0), zero_point)


def _convolve(
    codes: Any,
    zero_point: Any,
    weight: Any,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Any:
    one = op.Constant(value_float=1.0)
    whole = op.DequantizeLinear(codes, one, zero_point), op.DequantizeLinear(weight, one)
    return op.Conv(*whole, **window(stride, padding, dilation, groups))


def _weights_by_output(graph: ir.Graph) -> None:
    """Weights (in, out) are stored as (out, in) and transposed after dequantization."""
    for node in list(graph):
        codes = node.inputs[0] if node.op_type == "DequantizeLinear" else None
        if codes is None or codes.const_value is None or len(codes.const_value.shape) != 2:
            continue
        name, weight = f"{codes.name}_by_output", codes.const_value.numpy()
        by_output = ir.Value(name=name, const_value=ir.tensor(np.ascontiguousarray(weight.T), name=name))
        graph.register_initializer(by_output)
        node.replace_input_with(0, by_output)
        node.attributes["axis"] = ir.AttrInt64("axis", 0)
        dequantized = node.outputs[0]
        dequantized.shape = ir.Shape(weight.T.shape)
        transpose = ir.node("Transpose", [dequantized], {"perm": [1, 0]}, name=f"{codes.name}_transposed")
        back = transpose.outputs[0]
        back.name, back.type, back.shape = f"{codes.name}_back", dequantized.type, ir.Shape(weight.shape)
        graph.insert_after(node, transpose)
        for use in list(dequantized.uses()):
            if use.node is not transpose:
                use.node.replace_input_with(use.idx, back)
