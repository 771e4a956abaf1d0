"""Move the state of autocast and of gradients from marks in the graph onto the nodes.

Before: ``enter_region`` marks say from where on autocast is in another state.
After:  no marks; every node knows its state, as ``node.meta["region"]`` and ``node.meta["grad"]``.

Gradient mode stays in the graph too, as ``_set_grad_enabled`` nodes: it must be set when the graph runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Graph

from fxamp.capture.recorder import set_grad_enabled
from fxamp.ir.regions import Region, enter_region
from fxamp.passes.base import Pass

__all__ = ["FlattenRegions"]


@dataclass(frozen=True)
class FlattenRegions(Pass):
    """Give every node its region and gradient mode.

    Attributes:
        region: The state of autocast that the graph begins in.
        grad: The gradient mode that it begins in.
    """

    name: ClassVar[str] = "flatten-regions"
    region: Region
    grad: bool

    def run(self, graph: Graph) -> bool:
        region, grad, changed = self.region, self.grad, False
        for node in list(graph.nodes):
            if node.target is enter_region:
                region = node.args[0]
                graph.erase_node(node)
                changed = True
                continue
            if node.target is set_grad_enabled:
                grad = node.args[0]
            if "region" not in node.meta:
                node.meta["region"], node.meta["grad"] = region, grad
                changed = True
        return changed
