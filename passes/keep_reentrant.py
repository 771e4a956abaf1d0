"""Run the kernels that consult autocast themselves inside a real region.

They are those of ``fxamp/policy/reentrant.py``, the loops over time of ``fxamp/policy/time_loops.py``, and
every operator from outside of torch's own library: what its kernel calls, or whether it has an autocast
kernel of its own, only the dispatcher knows.

Before: such an operator is a plain node, and would see no autocast when the graph runs.
After:  it is called through ``run_in_region`` with the region it was captured in, under the policy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch._ops import OpOverload
from torch.fx import Graph, Node

from fxamp.capture.policy_dispatch import PolicyRegion
from fxamp.ir.regions import run_in_region
from fxamp.passes.base import Pass
from fxamp.policy import CastPolicy
from fxamp.policy.reentrant import REENTRANT
from fxamp.policy.scopes import PlacedPolicy

__all__ = ["KeepReentrant"]


@dataclass(frozen=True)
class KeepReentrant(Pass):
    """Every operator in an enabled region whose kernel consults autocast runs inside that region."""

    name: ClassVar[str] = "keep-reentrant"
    placed: PlacedPolicy | None = None

    def run(self, graph: Graph) -> bool:
        changed = False
        for node in graph.nodes:
            if isinstance(node.target, OpOverload) and node.meta["region"].enabled and _consults(node):
                node.args = (self._region_of(node), node.target, *node.args)
                node.target = run_in_region
                changed = True
        return changed

    def _region_of(self, node: Node) -> Any:
        region = node.meta["region"]
        if self.placed is None:
            return region
        site = node.meta.get("site")
        where = {} if site is None else {"modules": site.modules, "scopes": site.scopes}
        return PolicyRegion(region, self.placed, **where)


def _consults(node: Node) -> bool:
    assert isinstance(node.target, OpOverload)
    if "whole" in node.meta:
        return True
    decision = node.meta.get("decision")
    if decision is not None and decision.rule.cast is not CastPolicy.CUDNN_RNN:
        return False  # below its wrapper nothing is cast
    custom = decision is not None and decision.rule.cast is CastPolicy.CUDNN_RNN
    foreign = node.target.namespace != "aten"
    return custom or foreign or node.target.name() in REENTRANT or "keep_region" in node.meta
