"""No cast is left in a tidy model that a runtime could do without, and no value is another."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from benchmarks.onnx_casts import Casts, casts_in
from fxamp.export.onnx_tidy import tidy

DTYPES = {
    ir.DataType.FLOAT16: np.float16, ir.DataType.FLOAT: np.float32, ir.DataType.DOUBLE: np.float64,
    ir.DataType.INT32: np.int32, ir.DataType.INT64: np.int64, ir.DataType.BOOL: np.bool_,
}  # fmt: skip
WEIGHT = np.array([[1.0, -0.3], [70000.1, 1e-7]], np.float32)

Step = tuple[str, int, ir.DataType]
steps = st.lists(
    st.tuples(
        st.sampled_from(["Cast", "Cast", "Cast", "Transpose", "Identity"]),
        st.integers(0, 20),
        st.sampled_from(list(DTYPES)),
    ),
    min_size=1,
    max_size=12,
)


def _model(dtype: ir.DataType, chosen: list[Step]) -> ir.Model:
    """A model that makes values of an input and of a weight, one of an earlier one each; all come out."""
    shape = ir.Shape([2, 2])
    x = ir.Value(name="x", type=ir.TensorType(dtype), shape=shape)
    tensor = ir.tensor(WEIGHT, name="weight")
    weight = ir.Value(name="weight", type=ir.TensorType(ir.DataType.FLOAT), shape=shape, const_value=tensor)
    values, nodes = [x, weight], list[ir.Node]()
    for kind, index, to in chosen:
        value = values[index % len(values)]
        node = ir.node(kind, [value], {"to": int(to)} if kind == "Cast" else {})
        (output,) = node.outputs
        output.name = f"value_{len(nodes)}"
        output.type = ir.TensorType(to) if kind == "Cast" else value.type
        output.shape = shape
        nodes.append(node)
        values.append(output)
    results = []
    for index, value in enumerate(values[2:]):  # read by an operator, so that a cast may go
        node = ir.node("Transpose", [value])
        node.outputs[0].name, node.outputs[0].type = f"result_{index}", value.type
        node.outputs[0].shape = shape
        nodes.append(node)
        results.append(node.outputs[0])
    graph = ir.Graph([x], results, nodes=nodes, initializers=[weight], opset_imports={"": 20}, name="casts")
    return ir.Model(graph, ir_version=10)


def _values(model: ir.Model, x: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    with np.errstate(all="ignore"):
        return list(ReferenceEvaluator(ir.to_proto(model)).run(None, {"x": x}))


def _redundant(casts: Casts) -> int:
    return casts.of_weights + casts.chains - casts.roundings + casts.idle + casts.repeated


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(DTYPES)), steps)
def test_no_redundant_cast_is_left_and_values_stay(dtype: ir.DataType, chosen: list[Step]) -> None:
    model = _model(dtype, chosen)
    x: np.ndarray[Any, Any] = np.array([[0.0, 1.5], [-3.25, 65.0]]).astype(DTYPES[dtype])
    before = _values(model, x)

    tidy(model)

    assert _redundant(casts_in(ir.to_proto(model))) == 0
    for one, other in zip(_values(model, x), before, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
