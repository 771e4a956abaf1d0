"""Remove what nobody reads.

Kept are nodes that do more than return a value: in-place operators, random ones (they move the random
state on), changes of the gradient mode; and the inputs.  Exact for training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Graph

from fxamp.ir.operators import is_impure
from fxamp.passes.base import Pass

__all__ = ["RemoveDeadCode"]


@dataclass(frozen=True)
class RemoveDeadCode(Pass):
    """Every node is used, or does more than return a value."""

    name: ClassVar[str] = "remove-dead-code"

    def run(self, graph: Graph) -> bool:
        changed = False
        for node in reversed(list(graph.nodes)):
            if not node.users and not is_impure(node):
                graph.erase_node(node)
                changed = True
        return changed
