"""Remove what nobody reads.

Kept are nodes that do more than return a value: in-place operators, random ones (they move the random
state on), changes of the gradient mode; the inputs; and operators on floating tensors of several dtypes,
which a kernel may refuse and a fake tensor let pass: eager raises, so the graph must.  Exact for training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Graph, Node

from fxamp.ir.facts import fact_of_node
from fxamp.ir.operators import is_impure
from fxamp.passes.base import Pass

__all__ = ["RemoveDeadCode"]


@dataclass(frozen=True)
class RemoveDeadCode(Pass):
    """Every node is used, or does more than return a value, or may raise."""

    name: ClassVar[str] = "remove-dead-code"

    def run(self, graph: Graph) -> bool:
        changed = False
        for node in reversed(list(graph.nodes)):
            if not node.users and not is_impure(node) and not _mixes_dtypes(node):
                graph.erase_node(node)
                changed = True
        return changed


def _mixes_dtypes(node: Node) -> bool:
    facts = [fact_of_node(argument) for argument in node.all_input_nodes]
    return len({fact.dtype for fact in facts if fact is not None and fact.dtype.is_floating_point}) > 1
