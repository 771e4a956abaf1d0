"""Drop the casts to the dtype that a value already has.

``x.to(dtype)`` gives back ``x`` itself where ``x`` has that dtype and no copy is asked for, so its uses may
take ``x``: the same tensor, the same bits, the same gradients.  Exact for training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Graph, Node

from fxamp.ir.facts import fact_of_node
from fxamp.ir.operators import is_to_dtype
from fxamp.passes.base import Pass

__all__ = ["FoldNoopCasts"]


@dataclass(frozen=True)
class FoldNoopCasts(Pass):
    """No cast in the graph is to the dtype that its argument already has."""

    name: ClassVar[str] = "fold-noop-casts"

    def run(self, graph: Graph) -> bool:
        changed = False
        for node in list(graph.nodes):
            if is_to_dtype(node) and _is_noop(node):
                source = node.args[0]
                assert isinstance(source, Node)
                node.replace_all_uses_with(source)
                graph.erase_node(node)
                changed = True
        return changed


def _is_noop(node: Node) -> bool:
    fact = fact_of_node(node.args[0])
    return len(node.args) == 2 and not node.kwargs and fact is not None and fact.dtype is node.args[1]
