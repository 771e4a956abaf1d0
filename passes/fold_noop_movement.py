"""Drop the movement that takes all of a value: ``x[:, :n]`` where there are ``n``, ``x.expand(x.shape)``.

The result is the value under another name, with the same memory, sizes and strides.  It stays where somebody
could tell the two apart: where the caller may get it, or its source comes from outside of the graph; where a
gradient is recorded; and in a graph that changes the shape of a tensor in place.  Exact for inference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from fxamp.ir.facts import fact_of_node
from fxamp.ir.operators import arguments_in_order, is_write
from fxamp.passes.clean_up import CleanUp

__all__ = ["FoldNoopMovement"]

aten = torch.ops.aten

# fmt: off
_WHOLE: Mapping[object, str] = MappingProxyType({
    # movement                why it takes all where the sizes are the same
    aten.slice.Tensor:        "with step 1 there is no other range of that length",
    aten.expand.default:      "no dimension is repeated",
    aten.expand_as.default:   "no dimension is repeated",
    aten.alias.default:       "it always does",
    aten.detach.default:      "it always does",
})
# fmt: on


@dataclass(frozen=True)
class FoldNoopMovement(CleanUp):
    """No slice or expansion inside the graph takes all of its argument."""

    name: ClassVar[str] = "fold-noop-movement"
    condition: ClassVar[str] = "it has the sizes of its argument, and nobody can tell the two apart"

    def run(self, graph: Graph) -> bool:
        found = [node for node in graph.nodes if node.target in _WHOLE and self.may_fold(node)]
        if not found or not self.keeps_shapes(graph):
            return False
        for node in found:
            source = node.args[0]
            assert isinstance(source, Node)
            node.replace_all_uses_with(source)
            graph.erase_node(node)
        return True

    def may_fold(self, node: Node) -> bool:
        """Whether *node* is its argument but for the name."""
        source = node.args[0]
        if not isinstance(source, Node) or source.op != "call_function" or not _takes_all(node):
            return False
        return self.may_touch(source, node) and not self.is_given_back(node)

    def is_given_back(self, node: Node) -> bool:
        """Whether the caller may get the very tensor: as a result, or from an operator that writes to it."""
        return any(user.op == "output" or is_write(user) for user in node.users)

    def keeps_shapes(self, graph: Graph) -> bool:
        """Whether no operator changes the shape of a tensor that is there."""
        return not any(map(_reshapes, graph.nodes))


def _takes_all(node: Node) -> bool:
    fact, source = fact_of_node(node), fact_of_node(node.args[0])
    given = {argument.name: value for argument, value in arguments_in_order(node)}
    if fact is None or source is None or given.get("step", 1) != 1:
        return False
    return fact.shape == source.shape


def _reshapes(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.inplace_view in node.target.tags
