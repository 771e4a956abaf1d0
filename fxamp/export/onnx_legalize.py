"""Make each operator of a model have the dtypes that ONNX allows it.

Kernels of torch take what ONNX forbids: a normalisation of a float16 tensor with float32 weights, say.  They
compute in the wider dtype and round once.  Here that is written out:

==================================  ==================================================================
an operator                         becomes
==================================  ==================================================================
whose type variable T has two       inputs of T cast to the wider one, the operator, its results cast
floating dtypes                     to what torch gives
that lacks the low precision dtype  the same with float32
whose results torch gives in        the operator, then a cast
another dtype
==================================  ==================================================================

A sequence has the dtype of the tensors in it: what is put into it is cast, and what is taken out of it.

What ONNX allows to be mixed stays so: a ``BatchNormalization`` has one type variable for what it normalises,
one for its weights and one for its statistics.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import onnx
import onnx_ir as ir
from onnx_ir.traversal import RecursiveGraphIterator

__all__ = ["legalize", "schema_of", "type_variables"]

_FLOATS = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE)
_NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def legalize(model: ir.Model) -> None:
    """Insert the casts without which an operator of *model* has dtypes that ONNX forbids.

    Before, values that torch's exporter made up may have no dtype; after, all have one.
    """
    opsets = dict(model.opset_imports)
    for node in list(RecursiveGraphIterator(model.graph)):
        schema = schema_of(node, opsets)
        if node.op_type in ("Cast", "CastLike", "Constant") or schema is None:
            _note_dtype(node)
            continue
        _legalize_node(node, schema)


def schema_of(node: ir.Node, opsets: Mapping[str, int]) -> onnx.defs.OpSchema | None:
    """What ONNX says of the operator in the opset of the model; ``None`` for a custom one."""
    try:
        return onnx.defs.get_schema(node.op_type, opsets[node.domain], node.domain)
    except (onnx.defs.SchemaError, KeyError):
        return None


def _legalize_node(node: ir.Node, schema: onnx.defs.OpSchema) -> None:
    bound: dict[str, ir.DataType] = {}
    for variable, indices in type_variables(node, schema).items():
        dtypes = [dtype for index in indices if (dtype := _dtype(node, index)) is not None]
        if not dtypes:
            continue
        bound[variable] = dtypes[0]
        if all(dtype in _FLOATS for dtype in dtypes):
            bound[variable] = _allowed(_join(dtypes), variable, schema)
            _cast_inputs(node, indices, bound[variable])
    sequences = _sequences(schema)
    for output, variable in zip(node.outputs, _formal(schema.outputs, len(node.outputs)), strict=True):
        if variable not in sequences:
            _check_output(node, output, bound.get(variable, _concrete(variable, node)))
        elif _ELEMENT in bound:
            output.type = ir.SequenceType(ir.TensorType(bound[_ELEMENT]))


def type_variables(node: ir.Node, schema: onnx.defs.OpSchema) -> dict[str, list[int]]:
    """The inputs of *node* by the type variable that they share; a sequence by that of the tensors in it."""
    found: dict[str, list[int]] = defaultdict(list)
    sequences = _sequences(schema)
    for index, variable in enumerate(_formal(schema.inputs, len(node.inputs))):
        if node.inputs[index] is not None:
            found[_ELEMENT if variable in sequences else variable].append(index)
    return dict(found)


_ELEMENT = "T"  # what ONNX's operators on sequences call the type of the tensors in them


def _sequences(schema: onnx.defs.OpSchema) -> frozenset[str]:
    """The type variables that stand for sequences only."""
    return frozenset(
        row.type_param_str
        for row in schema.type_constraints
        if all(allowed.startswith("seq(") for allowed in row.allowed_type_strs)
    )


def _formal(parameters: object, count: int) -> list[str]:
    """The type of each of *count* parameters; the last of an operator may stand for many."""
    formal = list(parameters)  # type: ignore[call-overload]
    names = []
    for index in range(count):
        parameter = formal[min(index, len(formal) - 1)]
        alike = getattr(parameter, "is_homogeneous", True)
        names.append(parameter.type_str if alike else f"{parameter.type_str} {index}")
    return names


def _dtype(node: ir.Node, index: int) -> ir.DataType | None:
    value = node.inputs[index]
    return None if value is None else value.dtype


def _join(dtypes: list[ir.DataType]) -> ir.DataType:
    distinct = set(dtypes)
    if len(distinct) == 1:
        return dtypes[0]
    return ir.DataType.DOUBLE if ir.DataType.DOUBLE in distinct else ir.DataType.FLOAT


def _allowed(dtype: ir.DataType, variable: str, schema: onnx.defs.OpSchema) -> ir.DataType:
    """*dtype*, or float32 if the operator exists in that only."""
    constraint = next((row for row in schema.type_constraints if row.type_param_str == variable), None)
    if constraint is None or dtype not in _NARROW:
        return dtype
    return dtype if f"tensor({dtype.name.lower()})" in constraint.allowed_type_strs else ir.DataType.FLOAT


def _cast_inputs(node: ir.Node, indices: list[int], dtype: ir.DataType) -> None:
    made: dict[ir.Value, ir.Value] = {}
    for index in indices:
        value = node.inputs[index]
        if value is None or value.dtype in (dtype, None):
            continue
        if value not in made:
            cast = _cast(value, dtype)
            node.prepend(cast)
            made[value] = cast.outputs[0]
        node.replace_input_with(index, made[value])


def _cast(value: ir.Value, dtype: ir.DataType) -> ir.Node:
    cast = ir.node("Cast", [value], {"to": int(dtype)})
    cast.outputs[0].type = ir.TensorType(dtype)
    cast.outputs[0].shape = value.shape
    return cast


def _check_output(node: ir.Node, output: ir.Value, dtype: ir.DataType | None) -> None:
    """Note *dtype*; where torch gives another one, cast to that."""
    given = output.dtype
    if dtype is None or given == dtype:
        return
    if given is None:
        output.type = ir.TensorType(dtype)
        return
    if dtype not in _FLOATS or given not in _FLOATS:
        return
    cast = _cast(output, given)
    name, output.name = output.name, f"{output.name}_wide"
    cast.outputs[0].name = name
    cast.outputs[0].metadata_props.update(output.metadata_props)
    node.append(cast)
    output.replace_all_uses_with(cast.outputs[0], replace_graph_outputs=True)
    cast.replace_input_with(0, output)
    output.type = ir.TensorType(dtype)


def _concrete(variable: str, node: ir.Node) -> ir.DataType | None:
    """The dtype of an output that has a fixed one, or that an attribute tells."""
    if variable.startswith("tensor("):
        name = variable.removeprefix("tensor(").removesuffix(")").upper()
        return ir.DataType[name] if name in ir.DataType.__members__ else None
    told = node.attributes.get("dtype")
    return None if told is None else ir.DataType(told.as_int())


def _note_dtype(node: ir.Node) -> None:
    (output, *_) = node.outputs
    if output.dtype is not None:
        return
    dtypes = [*_told_dtypes(node)]
    if dtypes:
        output.type = ir.TensorType(dtypes[0])


def _told_dtypes(node: ir.Node) -> Iterator[ir.DataType]:
    if node.op_type == "Cast":
        yield ir.DataType(node.attributes["to"].as_int())
    elif node.op_type == "CastLike" and (dtype := _dtype(node, 1)) is not None:
        yield dtype
    elif node.op_type == "Constant":
        tensor = ir.convenience.get_const_tensor(node.outputs[0])
        if tensor is not None:
            yield tensor.dtype
