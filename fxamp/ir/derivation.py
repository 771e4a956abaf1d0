"""How one tensor is computed from others that a graph reads: a graph of its own, and a key to share it by.

The operators are those of the graph that it was cut from, in their order, with their very arguments.  So what
it computes has the same bits, and two derivations with one key that are given the same tensors compute the
same.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

__all__ = ["Derivation", "derivation_of"]


@dataclass(frozen=True, eq=False)
class Derivation:
    """The computation of one tensor.

    Attributes:
        graph: It reads *sources* and nothing else, in that order, and its one output is the tensor.
        sources: The targets of the ``get_attr`` nodes, as in the graph that it was cut from.
        key: The operators with their arguments; a tensor is the number of the source or operator that it
            comes from.
    """

    graph: Graph
    sources: tuple[str, ...]
    key: Hashable

    def result(self) -> Node:
        """The node that the tensor is the value of."""
        (node,) = self.graph.output_node().all_input_nodes
        return node

    def without(self, casts: Iterable[Node]) -> Graph:
        """A graph that computes the same but for *casts*, nodes of its own, which it leaves out."""
        graph, copies = Graph(), dict[Node, Node]()
        graph.output(graph.graph_copy(self.graph, copies))
        for cast in casts:
            source = cast.args[0]
            assert isinstance(source, Node)
            copies[cast].replace_all_uses_with(copies[source])
        return graph


def derivation_of(result: Node, parts: Iterable[Node]) -> Derivation:
    """How *result* is computed from ``get_attr`` nodes.

    Args:
        result: One of *parts*.
        parts: In their order, all nodes that its value comes from.
    """
    calls = [node for node in parts if node.op != "get_attr"]
    sources = dict.fromkeys(
        given for call in calls for given in call.all_input_nodes if given.op == "get_attr"
    )
    numbers = {node: ("source", index) for index, node in enumerate(sources)}
    numbers |= {node: ("call", index) for index, node in enumerate(calls)}
    graph, copies = Graph(), dict[Node, Node]()
    for node in (*sources, *calls):
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta.pop("val", None)  # no fake tensor is to live on in it
    graph.output((copies[result],))
    key = tuple((call.target, _frozen(call.args, numbers), _frozen(call.kwargs, numbers)) for call in calls)
    return Derivation(graph, tuple(str(node.target) for node in sources), (key, numbers[result]))


def _frozen(value: Any, numbers: Mapping[Node, tuple[str, int]]) -> Hashable:
    """*value* in a form that can be compared, NaN and -0.0 too."""
    if isinstance(value, Node):
        return numbers[value]
    if isinstance(value, dict):
        return tuple((name, _frozen(item, numbers)) for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(item, numbers) for item in value)
    if isinstance(value, slice):
        return ("slice", *(_frozen(item, numbers) for item in (value.start, value.stop, value.step)))
    return type(value), repr(value)
