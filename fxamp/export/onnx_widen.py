"""A model that onnxruntime's CPU provider can run in the place of one whose bfloat16 kernels it lacks.

Each operator without a kernel runs in float32, between casts, as the provider itself does it for float16; so
every value is rounded where the model rounds it.  Inputs and outputs in bfloat16 are float32 ones with the
same values, since numpy has no bfloat16.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.traversal import RecursiveGraphIterator

from fxamp.export.onnx_kernels import has_kernel

__all__ = ["widen"]

_LOW = ir.DataType.BFLOAT16
_WIDE = ir.DataType.FLOAT


def widen(model: ir.Model) -> None:
    """Rewrite *model* in place."""
    for node in list(RecursiveGraphIterator(model.graph)):
        if not has_kernel(node, model.opset_imports):
            _widen_node(node)
    for value in model.graph.inputs:
        _widen_input(value)
    for index, value in enumerate(list(model.graph.outputs)):
        _widen_output(model, index, value)


def _widen_node(node: ir.Node) -> None:
    for index, value in enumerate(node.inputs):
        if value is not None and value.dtype == _LOW:
            cast = _cast(value, _WIDE)
            node.prepend(cast)
            node.replace_input_with(index, cast.outputs[0])
    for attribute in list(node.attributes.values()):
        if attribute.name == "dtype" and attribute.as_int() == _LOW:
            node.attributes["dtype"] = ir.AttrInt64("dtype", int(_WIDE))
    for output in node.outputs:
        if output.dtype != _LOW:
            continue
        cast = _cast(output, _LOW)
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
