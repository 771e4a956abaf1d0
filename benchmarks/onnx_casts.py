"""The casts of an ONNX file, counted in the messages themselves: graphs, what they contain, and functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx

__all__ = ["Casts", "casts_of"]

_LOSES = {
    onnx.TensorProto.FLOAT16: (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE),
    onnx.TensorProto.BFLOAT16: (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE),
}


@dataclass(frozen=True)
class Casts:
    """How many there are.

    Attributes:
        all: ``Cast`` nodes.
        of_weights: Those that read an initializer or a ``Constant``.
        chains: Those that read the result of another.
        roundings: Those of the chains whose first cast loses bits, and so cannot be left out.
    """

    all: int
    of_weights: int
    chains: int
    roundings: int


@dataclass(frozen=True)
class _Scope:
    """What the names mean that the nodes of a graph read."""

    constants: frozenset[str]
    casts: Mapping[str, int]  # the dtype that each gives


def casts_of(path: Path) -> Casts:
    """Count in the file *path*; its external data is not read."""
    model = onnx.load(str(path), load_external_data=False)
    found = [*_nodes(model.graph, _Scope(frozenset(), {}))]
    for function in model.functions:
        found += _nodes(function, _Scope(frozenset(), {}))
    casts = [(node, scope) for node, scope in found if node.op_type == "Cast"]
    chained = [(node, scope) for node, scope in casts if node.input[0] in scope.casts]
    return Casts(
        len(casts),
        sum(node.input[0] in scope.constants for node, scope in casts),
        len(chained),
        sum(scope.casts[node.input[0]] in _LOSES for node, scope in chained),
    )


def _nodes(
    graph: onnx.GraphProto | onnx.FunctionProto, outer: _Scope
) -> Iterator[tuple[onnx.NodeProto, _Scope]]:
    """Each node, with those of the graphs inside of it."""
    made = {name for node in graph.node if node.op_type == "Constant" for name in node.output}
    if isinstance(graph, onnx.GraphProto):
        made |= {weight.name for weight in graph.initializer}
    casts = {node.output[0]: _dtype(node) for node in graph.node if node.op_type == "Cast"}
    scope = _Scope(outer.constants | made, {**outer.casts, **casts})
    for node in graph.node:
        yield node, scope
        for attribute in node.attribute:
            inside = [*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])]
            for each in inside:
                yield from _nodes(each, scope)


def _dtype(node: onnx.NodeProto) -> int:
    return next((int(attribute.i) for attribute in node.attribute if attribute.name == "to"), 0)
