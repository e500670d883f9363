"""Rearranging an exported graph so that bytes are moved instead of floats. No value changes by a bit.

Quantization is element-wise, so it commutes with whatever only moves elements. A model reshapes and transposes in
float and quantizes last; moved in front, the same movements carry a quarter of the bytes, and runtimes, which look
for integers right before a product, find them there.
"""

import math

import numpy as np
import onnx_ir as ir

MOVES = {"Transpose", "Reshape", "Squeeze", "Unsqueeze", "Flatten"}
"""Operators that only move elements of their first input."""


def move_bytes_not_floats(graph: ir.Graph) -> None:
    for node in list(graph):
        if node.op_type == "Transpose":
            _slice_before_transposing(graph, node)
    for node in list(graph):
        if node.op_type == "QuantizeLinear":
            while _skip_scaling(graph, node) or _quantize_before_moving(node):
                pass
    graph.sort()


def _quantize_before_moving(quantize: ir.Node) -> bool:
    """move -> quantize (-> clip) becomes quantize (-> clip) -> move, where nothing else reads what is moved."""
    move = _maker(quantize)
    if move is None or move.op_type not in MOVES or not _read_once(move.outputs[0]):
        return False
    after = quantize.outputs[0].consumers()
    last = after[0] if len(after) == 1 and after[0].op_type == "Clip" else quantize
    before, moved, codes = _input(move, 0), move.outputs[0], last.outputs[0]
    codes.replace_all_uses_with(moved)
    quantize.replace_input_with(0, before)
    move.replace_input_with(0, codes)
    moved.type = codes.type
    codes.shape = quantize.outputs[0].shape = before.shape
    return True


def _skip_scaling(graph: ir.Graph, quantize: ir.Node) -> bool:
    """A factor before quantization goes into the scale, where it is a power of two: then no bit changes."""
    times = _maker(quantize)
    if times is None or times.op_type != "Mul" or not _read_once(times.outputs[0]):
        return False
    factor, scale = (ir.convenience.get_const_tensor(_input(node, 1)) for node in (times, quantize))
    if factor is None or scale is None or factor.size != 1:
        return False
    number = float(factor.numpy().reshape(()))
    if math.frexp(number)[0] != 0.5:
        return False
    smaller = ir.Value(name=f"{quantize.name}_scale", const_value=ir.tensor(np.float32(scale.numpy() / number)))
    graph.register_initializer(smaller)
    quantize.replace_input_with(0, times.inputs[0])
    quantize.replace_input_with(1, smaller)
    graph.remove(times, safe=True)
    return True


def _slice_before_transposing(graph: ir.Graph, transpose: ir.Node) -> None:
    """transpose -> (slice -> squeeze) for each part becomes (slice -> squeeze) -> transpose for each part.

    So are query, key and value taken apart; each can then be quantized with its own scale before it is moved.
    """
    order = list(transpose.attributes["perm"].as_ints())
    parts = [_part(consumer) for consumer in transpose.outputs[0].consumers()]
    if not parts or any(part is None for part in parts):
        return
    for part in parts:
        assert part is not None
        slicing, squeezing = part
        axis = order[0]
        rest = [d - (d > axis) for d in order[1:]]
        name = f"{slicing.name}_first"
        axes = ir.Value(name=f"{name}_axes", const_value=ir.tensor(np.array([axis], dtype=np.int64)))
        graph.register_initializer(axes)
        sliced = ir.node("Slice", [transpose.inputs[0], *slicing.inputs[1:3], axes], name=name)
        squeezed = ir.node("Squeeze", [sliced.outputs[0], axes], name=f"{name}_squeezed")
        moved = ir.node("Transpose", [squeezed.outputs[0]], {"perm": rest}, name=f"{name}_moved")
        for node in (sliced, squeezed, moved):
            node.outputs[0].name = f"{node.name}_output"
            node.outputs[0].type = _input(transpose, 0).type
        moved.outputs[0].shape = squeezing.outputs[0].shape
        graph.insert_after(squeezing, [sliced, squeezed, moved])
        squeezing.outputs[0].replace_all_uses_with(moved.outputs[0])
        graph.remove([squeezing, slicing], safe=True)
    graph.remove(transpose, safe=True)


def _part(node: ir.Node) -> tuple[ir.Node, ir.Node] | None:
    """A slice of the first dimension and the squeeze that drops it, or None."""
    if node.op_type != "Slice" or len(node.inputs) != 4 or not _read_once(node.outputs[0]):
        return None
    squeeze = node.outputs[0].consumers()[0]
    axes = [node.inputs[3], squeeze.inputs[1] if len(squeeze.inputs) > 1 else None]
    found = [None if a is None else ir.convenience.get_const_tensor(a) for a in axes]
    if squeeze.op_type != "Squeeze" or any(a is None or a.numpy().tolist() != [0] for a in found):
        return None
    return node, squeeze


def _input(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    assert value is not None
    return value


def _maker(node: ir.Node) -> ir.Node | None:
    """The node whose output is the first input of `node`."""
    return _input(node, 0).producer()


def _read_once(value: ir.Value) -> bool:
    return len(value.uses()) == 1 and not value.is_graph_output()
