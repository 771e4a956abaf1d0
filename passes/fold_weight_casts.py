"""Read the rounded copy of a weight instead of casting the weight, in a module whose weights do not change.

The copy is the very cast, made once, so its uses get the same bits.  Casting follows data movement, too:
``cast(view(weight))`` is ``view(cast(weight))`` where the view has all the elements of a dense piece of
memory, so that both casts give the same strides.  No gradient reaches the weight any more: inference-exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch.fx import Graph, Node

from fxamp.ir.facts import fact_of_node
from fxamp.ir.operators import TO_DTYPE, is_to_dtype
from fxamp.passes.base import Pass

__all__ = ["FoldWeightCasts", "is_cast_of_weight"]

_aten = torch.ops.aten
_MOVES = frozenset(
    {
        _aten.t.default, _aten.transpose.int, _aten.permute.default, _aten.numpy_T.default, _aten.mT.default,
        _aten.view.default, _aten.reshape.default, _aten.unsqueeze.default, _aten.squeeze.dim,
        _aten.squeeze.default, _aten.flatten.using_ints, _aten.unflatten.int,
    }
)  # fmt: skip
"""Views with all the elements of their argument, each once."""


@dataclass(frozen=True)
class FoldWeightCasts(Pass):
    """No cast of a weight is left in the graph, nor one of a view with all its elements.

    Attributes:
        weights: The targets of the ``get_attr`` nodes that are weights which nothing writes to; a node that
            this pass makes has the weight's target and the dtype in its ``meta["rounded"]``.
    """

    name: ClassVar[str] = "fold-weight-casts"
    weights: frozenset[str]

    def run(self, graph: Graph) -> bool:
        changed = False
        for node in list(graph.nodes):
            if node.op == "get_attr" and node.target in self.weights and "rounded" not in node.meta:
                changed |= _fold(graph, node)
        return changed


def is_cast_of_weight(node: Node) -> bool:
    """Whether *node* is a cast that autocast makes, to a low precision dtype."""
    return is_to_dtype(node) and "inserted" in node.meta and node.args[1] in (torch.float16, torch.bfloat16)


def _fold(graph: Graph, weight: Node) -> bool:
    changed = _cast_before_moves(graph, weight)
    copies: dict[torch.dtype, Node] = {}
    for cast in [user for user in weight.users if is_cast_of_weight(user)]:
        dtype = cast.args[1]
        assert isinstance(dtype, torch.dtype)
        if dtype not in copies:
            copies[dtype] = _copy(graph, weight, cast, dtype)
        cast.replace_all_uses_with(copies[dtype])
        graph.erase_node(cast)
        changed = True
    if not weight.users and changed:
        graph.erase_node(weight)
    return changed


def _copy(graph: Graph, weight: Node, cast: Node, dtype: torch.dtype) -> Node:
    """The source that stands for *cast* from now on."""
    with graph.inserting_after(weight):
        copy = graph.create_node("get_attr", f"{weight.target}_{dtype.abbr}", name=f"{weight.name}_low")
    copy.meta.update(fact=cast.meta["fact"], rounded=(weight.target, dtype), where=cast.meta.get("where"))
    return copy


def _cast_before_moves(graph: Graph, weight: Node) -> bool:
    changed = False
    for cast in list(_casts_behind_moves(weight)):
        moves: list[Node] = []
        node = cast.args[0]
        while node is not weight:
            assert isinstance(node, Node)
            moves.append(node)
            node = node.args[0]
        value = weight
        with graph.inserting_before(cast):
            value = graph.call_function(TO_DTYPE, (weight, cast.args[1]))
            value.meta.update(cast.meta, fact=_cast_fact(weight, cast))
            for move in reversed(moves):
                value = graph.node_copy(move, {move.args[0]: value}.__getitem__)
                value.meta["fact"] = _cast_fact(move, cast)
        cast.replace_all_uses_with(value)
        for dead in (cast, *moves):
            if not dead.users:
                graph.erase_node(dead)
        changed = True
    return changed


def _casts_behind_moves(node: Node) -> Iterator[Node]:
    for user in node.users:
        if user.target in _MOVES and user.args[0] is node and _only_argument(user):
            for after in user.users:
                if is_cast_of_weight(after):
                    yield after
            yield from _casts_behind_moves(user)


def _only_argument(move: Node) -> bool:
    return len(move.all_input_nodes) == 1


def _cast_fact(node: Node, cast: Node) -> object:
    fact, to = fact_of_node(node), fact_of_node(cast)
    assert fact is not None
    assert to is not None
    return replace(fact, dtype=to.dtype, leaf=False, requires_grad=False)
