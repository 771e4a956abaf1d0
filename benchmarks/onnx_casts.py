"""The casts of an ONNX file, counted in the messages themselves: graphs, what they contain, and functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

__all__ = ["Casts", "casts_in", "casts_of"]

_T = onnx.TensorProto
_SMALLER = {
    _T.DOUBLE: (_T.FLOAT, _T.FLOAT16, _T.BFLOAT16, _T.INT32, _T.INT16, _T.INT8, _T.UINT8, _T.BOOL),
    _T.FLOAT: (_T.FLOAT16, _T.BFLOAT16, _T.INT16, _T.INT8, _T.UINT8, _T.BOOL),
    _T.FLOAT16: (_T.INT8, _T.UINT8, _T.BOOL),
    _T.BFLOAT16: (_T.INT8, _T.UINT8, _T.BOOL),
    _T.INT64: (_T.INT32, _T.INT16, _T.INT8, _T.UINT8, _T.BOOL),
    _T.INT32: (_T.INT16, _T.INT8, _T.UINT8, _T.BOOL),
}
"""The dtypes all of whose values a dtype has."""


@dataclass(frozen=True)
class Casts:
    """How many there are.

    Attributes:
        all: ``Cast`` nodes.
        of_weights: Those that read an initializer or a ``Constant``.
        chains: Those that read the result of another.
        roundings: Those of the chains whose first cast loses bits, and so cannot be left out.
        idle: Those to the dtype that is there.
        repeated: Those of a value to a dtype that it is cast to already.
    """

    all: int
    of_weights: int
    chains: int
    roundings: int
    idle: int
    repeated: int


@dataclass(frozen=True)
class _Scope:
    """What the names mean that the nodes of a graph read."""

    constants: frozenset[str]
    casts: Mapping[str, onnx.NodeProto]  # by what each gives
    dtypes: Mapping[str, int]


def casts_of(path: Path) -> Casts:
    """Count in the file *path*; its external data is not read."""
    return casts_in(onnx.load(str(path), load_external_data=False))


def casts_in(model: onnx.ModelProto) -> Casts:
    """Count in *model*."""
    found = [*_nodes(model.graph, _Scope(frozenset(), {}, {}))]
    for function in model.functions:
        found += _nodes(function, _Scope(frozenset(), {}, {}))
    casts = [(node, scope) for node, scope in found if node.op_type == "Cast"]
    chained = [(node, scope) for node, scope in casts if node.input[0] in scope.casts]
    return Casts(
        len(casts),
        sum(node.input[0] in scope.constants for node, scope in casts),
        len(chained),
        sum(_loses(scope.casts[node.input[0]], scope) for node, scope in chained),
        sum(scope.dtypes.get(node.input[0]) == _to(node) for node, scope in casts),
        len(casts) - len({(id(scope), node.input[0], _to(node)) for node, scope in casts}),
    )


def _nodes(
    graph: onnx.GraphProto | onnx.FunctionProto, outer: _Scope
) -> Iterator[tuple[onnx.NodeProto, _Scope]]:
    """Each node, with those of the graphs inside of it."""
    made = {name for node in graph.node if node.op_type == "Constant" for name in node.output}
    if isinstance(graph, onnx.GraphProto):
        made |= {weight.name for weight in graph.initializer}
    casts = {node.output[0]: node for node in graph.node if node.op_type == "Cast"}
    values = list(graph.value_info)
    if isinstance(graph, onnx.GraphProto):
        values += [*graph.input, *graph.output]
    dtypes = {value.name: value.type.tensor_type.elem_type for value in values}
    scope = _Scope(outer.constants | made, {**outer.casts, **casts}, {**outer.dtypes, **dtypes})
    for node in graph.node:
        yield node, scope
        for attribute in node.attribute:
            inside = [*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])]
            for each in inside:
                yield from _nodes(each, scope)


def _loses(node: onnx.NodeProto, scope: _Scope) -> bool:
    """Whether a cast is known to change values."""
    to: Any = _to(node)
    given = scope.dtypes.get(node.input[0])
    return given is not None and given != to and given not in _SMALLER.get(to, ())


def _to(node: onnx.NodeProto) -> int:
    return int(next(attribute.i for attribute in node.attribute if attribute.name == "to"))
