"""Take out of a model what a runtime should not have to: casts of weights, constant arithmetic, doubles.

======================  ====================================================================================
what                    becomes
======================  ====================================================================================
arithmetic on numbers   a number
x + 0, x - 0, x * 1,    x, where the number is exactly that
x / 1
a weight, cast          a weight in that dtype; one more if other operators read the first
a weight, transposed    a weight that lies so
casts in a row          one, where the first loses nothing
equal small constants   one
notes of the exporter   left out: lines of generated code, of no use where the file goes
======================  ====================================================================================

No rule rounds anew.  So two of the usual ones are not among them: that which folds a normalisation into a
convolution, and that which takes an eps of 1e-12 for the zero that may be added to anything.
Weights stay views of torch's tensors, or are made when they are written, one at a time.
"""

from __future__ import annotations

import logging
import warnings
from types import MappingProxyType

import onnx_ir as ir
import onnxscript.optimizer
import onnxscript.rewriter
from onnx_ir.passes import common
from onnx_ir.traversal import RecursiveGraphIterator
from onnxscript.rewriter.rules import common as rules

__all__ = ["tidy"]

_SMALL = 1 << 10  # elements: what is arithmetic on sizes and scalars is below, weights are above
_GROWN = 1 << 20  # elements: a mask that constants make may have as many

_EXACT_RULES = (
    rules.no_op_cast_rule, rules.no_op_expand_rule, rules.no_op_transpose_rule,
    rules.transpose_transpose_rule, rules.unsqueeze_unsqueeze_rule, rules.dropout_inference_rule,
    rules.dropout_zero_rule, rules.collapse_slice_rule, rules.collapse_slice2_rule,
    rules.reshape_reshape_rule, rules.no_op_static_scatter_nd_rule, rules.no_op_dynamic_scatter_nd_rule,
    rules.cast_constant_of_shape_rule, rules.cast_constant_of_shape_without_value_rule,
)  # fmt: skip

_INTEGERS = (ir.DataType.INT8, ir.DataType.INT16, ir.DataType.INT32, ir.DataType.INT64)
_HOLDS = frozenset({
    (ir.DataType.FLOAT, ir.DataType.FLOAT16), (ir.DataType.FLOAT, ir.DataType.BFLOAT16),
    (ir.DataType.DOUBLE, ir.DataType.FLOAT16), (ir.DataType.DOUBLE, ir.DataType.BFLOAT16),
    (ir.DataType.DOUBLE, ir.DataType.FLOAT), (ir.DataType.DOUBLE, ir.DataType.INT32),
    *((wide, narrow) for at, wide in enumerate(_INTEGERS) for narrow in _INTEGERS[:at]),
    *((number, ir.DataType.BOOL) for number in (
        *_INTEGERS, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE
    )),
})  # fmt: skip
"""Pairs of dtypes of which the first holds all values of the second."""


def tidy(model: ir.Model) -> None:
    """Apply the rules above to *model*.

    After it no ``Cast`` reads a weight, each weight that is stored is read, and values have dtypes and
    shapes.
    """
    level = logging.getLogger("onnxscript").level
    logging.getLogger("onnxscript").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a number that overflows: as in torch
            _tidy(model)
    finally:
        logging.getLogger("onnxscript").setLevel(level)


def _tidy(model: ir.Model) -> None:
    for _ in range(2):
        onnxscript.optimizer.fold_constants(
            model, onnx_shape_inference=True, input_size_limit=_SMALL, output_size_limit=_GROWN
        )
        onnxscript.rewriter.rewrite(model, pattern_rewrite_rules=list(_EXACT_RULES))
        _fold_neutral(model)
        common.IdentityEliminationPass()(model)
        _fold_casts(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.LiftSubgraphInitializersToMainGraphPass()(model)
    while sum(_fold_into_weight(model, node) for node in RecursiveGraphIterator(model.graph)):
        pass  # a cast of a transposed weight takes two rounds
    common.DeduplicateInitializersPass(size_limit=_SMALL)(model)
    common.CommonSubexpressionEliminationPass()(model)
    common.RemoveUnusedNodesPass()(model)
    common.RemoveUnusedOpsetsPass()(model)
    for name, weight in list(model.graph.initializers.items()):
        if not weight.uses() and not weight.is_graph_output():
            del model.graph.initializers[name]
    common.TopologicalSortPass()(model)
    common.NameFixPass()(model)
    common.ShapeInferencePass()(model)
    _clear_notes(model)


def _clear_notes(model: ir.Model) -> None:
    common.ClearMetadataAndDocStringPass()(model)
    made = (value for node in RecursiveGraphIterator(model.graph) for value in node.outputs)
    for value in (*model.graph.inputs, *model.graph.initializers.values(), *made):
        value.metadata_props.clear()


# --- arithmetic ---------------------------------------------------------------------------------------

_NEUTRAL = MappingProxyType({"Add": 0, "Sub": 0, "Mul": 1, "Div": 1})
_COMMUTE = ("Add", "Mul")


def _fold_neutral(model: ir.Model) -> None:
    for node in RecursiveGraphIterator(model.graph):
        if node.op_type not in _NEUTRAL or node.domain or _comes_out(node):
            continue
        (left, right), neutral = node.inputs, _NEUTRAL[node.op_type]
        assert left is not None
        assert right is not None
        if _is_number(right, neutral, left):
            node.outputs[0].replace_all_uses_with(left)
        elif node.op_type in _COMMUTE and _is_number(left, neutral, right):
            node.outputs[0].replace_all_uses_with(right)


def _is_number(value: ir.Value, number: int, other: ir.Value) -> bool:
    """Whether *value* is exactly *number*, and has no more dimensions than *other*."""
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None or tensor.size != 1 or other.shape is None or len(tensor.shape) > len(other.shape):
        return False
    return bool(tensor.numpy().item() == number)


# --- casts --------------------------------------------------------------------------------------------


def _fold_casts(model: ir.Model) -> None:
    for node in RecursiveGraphIterator(model.graph):
        source = node.inputs[0].producer() if node.op_type == "Cast" and node.inputs[0] is not None else None
        if source is None or source.op_type != "Cast" or source.inputs[0] is None:
            continue
        origin = source.inputs[0]
        if (source.outputs[0].dtype, origin.dtype) in _HOLDS:
            node.replace_input_with(0, origin)
        if node.inputs[0] is origin and origin.dtype == node.outputs[0].dtype and not _comes_out(node):
            node.outputs[0].replace_all_uses_with(origin)


def _comes_out(node: ir.Node) -> bool:
    return any(value.is_graph_output() for value in node.outputs)


# --- weights ------------------------------------------------------------------------------------------


def _fold_into_weight(model: ir.Model, node: ir.Node) -> bool:
    """Store what *node* makes of a weight in the place of the weight; whether that was to be done."""
    if node.op_type not in ("Cast", "Transpose", "Identity") or node.domain or _comes_out(node):
        return False
    (weight, *_), (output, *_) = node.inputs, node.outputs
    if weight is None or not weight.is_initializer() or weight.const_value is None or not weight.uses():
        return False
    if not output.uses():
        return False
    if node.op_type == "Transpose" and len(weight.uses()) > 1:
        return False  # it would be stored twice, for a node that costs little
    stored = _made(node, weight.const_value)
    if stored is None:
        return False
    model.graph.register_initializer(_as_weight(model, stored, f"{weight.name}.{_SUFFIX[node.op_type]}"))
    output.replace_all_uses_with(model.graph.initializers[str(stored.name)])
    if not [user for user, _ in weight.uses() if user is not node]:
        node.replace_input_with(0, None)
        del model.graph.initializers[str(weight.name)]
    return True


_SUFFIX = {"Cast": "cast", "Transpose": "transposed", "Identity": "copy"}


def _as_weight(model: ir.Model, tensor: ir.LazyTensor, name: str) -> ir.Value:
    free = name
    count = 0
    while free in model.graph.initializers:
        count += 1
        free = f"{name}_{count}"
    tensor.name = free
    return ir.Value(name=free, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)


def _made(node: ir.Node, tensor: ir.TensorProtocol) -> ir.LazyTensor | None:
    """The tensor that *node* gives, made when it is written."""
    if node.op_type == "Transpose":
        order = tuple(node.attributes["perm"].as_ints()) if "perm" in node.attributes else None
        sizes = list(tensor.shape.numpy())
        shape = ir.Shape([sizes[axis] for axis in (order or range(len(sizes))[::-1])])
        return ir.LazyTensor(
            lambda: ir.Tensor(tensor.numpy().transpose(order).copy(), dtype=tensor.dtype),
            dtype=tensor.dtype, shape=shape,
        )  # fmt: skip
    dtype = tensor.dtype if node.op_type == "Identity" else ir.DataType(node.attributes["to"].as_int())
    shape = ir.Shape(tensor.shape.numpy())
    return ir.LazyTensor(
        lambda: ir.Tensor(tensor.numpy().astype(dtype.numpy()), dtype=dtype), dtype=dtype, shape=shape
    )
