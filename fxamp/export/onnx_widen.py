"""A model that onnxruntime's CPU provider can run in the place of one whose low precision kernels it lacks.

Each operator without a kernel runs in float32, between casts; so every value is rounded where the model
rounds it.  For float16 the provider inserts such casts itself, but leaves out those between two operators
that it lacks, and so computes with numbers that float16 does not have: this is how to see what that does.
Inputs and outputs in bfloat16 are float32 ones with the same values, since numpy has no bfloat16.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.traversal import RecursiveGraphIterator

from fxamp.export.onnx_kernels import has_kernel

__all__ = ["widen", "widen_float16"]

_LOW = ir.DataType.BFLOAT16
_WIDE = ir.DataType.FLOAT


def widen(model: ir.Model) -> None:
    """Rewrite *model* in place: where it has bfloat16."""
    _widen_nodes(model, _LOW)
    for value in model.graph.inputs:
        _widen_input(value)
    for index, value in enumerate(list(model.graph.outputs)):
        _widen_output(model, index, value)


def widen_float16(model: ir.Model) -> None:
    """Rewrite *model* in place: where it has float16; to be run without optimizations.

    After each cast to float16 comes an ``Identity``: the provider takes two casts in a row for none.
    """
    for cast in _widen_nodes(model, ir.DataType.FLOAT16):
        (output,) = cast.outputs
        kept = ir.node("Identity", [output])
        kept.outputs[0].type, kept.outputs[0].shape = output.type, output.shape
        cast.append(kept)
        output.replace_all_uses_with(kept.outputs[0], replace_graph_outputs=True)
        kept.replace_input_with(0, output)
        kept.outputs[0].name, output.name = output.name, f"{output.name}_rounded"


def _widen_nodes(model: ir.Model, low: ir.DataType) -> list[ir.Node]:
    """Widen what has no kernel; all casts to *low* that are then there."""
    for node in list(RecursiveGraphIterator(model.graph)):
        if not has_kernel(node, model.opset_imports):
            _widen_node(node, low)
    nodes = RecursiveGraphIterator(model.graph)
    return [node for node in nodes if node.op_type == "Cast" and node.outputs[0].dtype == low]


def _widen_node(node: ir.Node, low: ir.DataType) -> None:
    for index, value in enumerate(node.inputs):
        if value is not None and value.dtype == low:
            cast = _cast(value, _WIDE)
            node.prepend(cast)
            node.replace_input_with(index, cast.outputs[0])
    for attribute in list(node.attributes.values()):
        if attribute.name == "dtype" and attribute.as_int() == low:
            node.attributes["dtype"] = ir.AttrInt64("dtype", int(_WIDE))
    for output in node.outputs:
        if output.dtype != low:
            continue
        cast = _cast(output, low)
        node.append(cast)
        output.replace_all_uses_with(cast.outputs[0], replace_graph_outputs=True)
        cast.replace_input_with(0, output)
        cast.outputs[0].name, output.name = output.name, f"{output.name}_wide"
        output.type = ir.TensorType(_WIDE)


def _cast(value: ir.Value, dtype: ir.DataType) -> ir.Node:
    cast = ir.node("Cast", [value], {"to": int(dtype)})
    cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(dtype), value.shape
    return cast


def _widen_input(value: ir.Value) -> None:
    if value.dtype != _LOW:
        return
    graph = value.graph
    assert isinstance(graph, ir.Graph)
    cast = _cast(value, _LOW)
    value.replace_all_uses_with(cast.outputs[0])
    cast.replace_input_with(0, value)
    value.type = ir.TensorType(_WIDE)
    graph.insert_before(graph[0], cast)


def _widen_output(model: ir.Model, index: int, value: ir.Value) -> None:
    if value.dtype != _LOW:
        return
    cast = _cast(value, _WIDE)
    name, value.name = value.name, f"{value.name}_low"
    cast.outputs[0].name = name
    model.graph.append(cast)
    model.graph.outputs[index] = cast.outputs[0]
