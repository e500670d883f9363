"""A lowered model as ONNX in QDQ form: integers with DequantizeLinear in front of every product."""

import contextlib
import inspect
import io
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import onnx_ir as ir
import onnxscript
import torch
from torch import Tensor, nn

from fimaq.export.layout import move_bytes_not_floats
from fimaq.export.lower import IntegerWeight
from fimaq.export.sessions import INPUT, OUTPUT

OPSET = 21
PROCESSOR = "fimaq.processor"
"""The entry of a file's metadata that names the only processors it is right on; without one it is on any."""
Step = tuple[int, int]

op: Any = onnxscript.opset21


def write(
    model: nn.Module, example: Tensor, path: Path, lowered: bool, step: Step | None = None, processor: str = "any"
) -> None:
    translated = onnx_model(model, example, step) if lowered else translate(model, example, step)
    if processor != "any":
        translated.metadata_props[PROCESSOR] = processor
    path.write_bytes(ir.to_proto(translated).SerializeToString())


def onnx_model(lowered: nn.Module, example: Tensor, step: Step | None = None) -> ir.Model:
    """`example`: images (2, C, H, W). The number of images is left open; `step` leaves their size open too."""
    model = translate(lowered, example, step)
    move_bytes_not_floats(model.graph)
    for name, module in lowered.named_modules():
        if isinstance(module, IntegerWeight) and module.bits == 4:
            _pack(model.graph, f"{name}.codes")
    return model


def translate(model: nn.Module, example: Tensor, step: Step | None = None, **instead: Any) -> ir.Model:
    """Any model as an ONNX graph, as PyTorch's exporter writes it.

    `step`: height and width are open, in multiples of these; without it they are the example's. `instead`: other
    translations of the operators of operators.py, by name.
    """
    shape: dict[int, Any] = {0: torch.export.Dim("batch", min=1, max=2**16)}
    for axis, (name, multiple) in enumerate(zip(("rows", "columns"), step or (), strict=False), start=2):
        shape[axis] = multiple * torch.export.Dim(name, min=2, max=2**12)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        warnings.simplefilter("ignore")
        # A model whose own forward was opened for its products takes `*args`: their shapes are told as a tuple.
        first = next(iter(inspect.signature(model.forward).parameters.values()))
        shapes = ((shape,),) if first.kind is first.VAR_POSITIONAL else (shape,)
        program = torch.export.export(model, (example,), dynamic_shapes=shapes, strict=False)
        exported = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=OPSET,
            input_names=[INPUT],
            output_names=[OUTPUT],
            custom_translation_table={
                getattr(torch.ops.fimaq, name).default: function
                for name, function in (TRANSLATIONS | instead).items()
            },
            optimize=True,
            verbose=False,
        )
    assert exported is not None
    return exported.model


def _quantize(x: Any, scale: Any, zero_point: Any, low: int, high: int) -> Any:
    codes = op.QuantizeLinear(x, scale, zero_point)
    if high - low == 255:
        return codes
    limits = [op.CastLike(op.Constant(value_int=limit), zero_point) for limit in (low, high)]
    return op.Clip(codes, *limits)


def _multiply(
    left: Any, left_scale: Any, left_zero_point: Any, right: Any, right_scale: Any, right_zero_point: Any
) -> Any:
    columns = {"axis": 1} if len(right_scale.shape) else {}
    return op.MatMul(
        op.DequantizeLinear(left, left_scale, left_zero_point),
        op.DequantizeLinear(right, right_scale, right_zero_point, **columns),
    )


def _convolve(
    codes: Any,
    zero_point: Any,
    weight: Any,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Any:
    sums = op.ConvInteger(codes, weight, zero_point, **window(stride, padding, dilation, groups))
    return op.Cast(sums, to=ir.DataType.FLOAT)


def window(stride: list[int], padding: list[int], dilation: list[int], groups: int) -> dict[str, Any]:
    """ONNX's attributes of a convolution. `padding`: left, right, top, bottom."""
    left, right, top, bottom = padding
    return {"strides": stride, "pads": [top, left, bottom, right], "dilations": dilation, "group": groups}


def _on_grid(x: Any, offset: float) -> Any:
    large = op.Constant(value_float=offset)
    return op.Sub(op.Add(x, large), large)


TRANSLATIONS: dict[str, Any] = {
    "quantize": _quantize,
    "multiply": _multiply,
    "convolve": _convolve,
    "on_grid": _on_grid,
}


def _pack(graph: ir.Graph, name: str) -> None:
    """Store a weight's codes as 4-bit integers, which a runtime widens to 8 bits when it loads the file."""
    codes = graph.initializers.pop(name)
    assert codes.const_value is not None
    packed = ir.Value(
        name=f"{name}_int4",
        const_value=ir.tensor(codes.const_value.numpy().astype(ml_dtypes.int4), name=f"{name}_int4"),
    )
    graph.register_initializer(packed)
    widen = ir.node("Cast", [packed], {"to": ir.DataType.INT8}, name=f"{name}_widened")
    widen.outputs[0].name = name
    widen.outputs[0].type, widen.outputs[0].shape = codes.type, codes.shape
    graph.insert_before(graph[0], widen)
    codes.replace_all_uses_with(widen.outputs[0])
