"""Decide the dtype of operators whose inputs must agree (``cat``, ``index_put``).

Before: a promoting node has a decision without a target.
After:  its target is the low precision dtype, or float32 if any tensor that takes part is float32.

The order of the arguments matters, as it does in eager autocast (``prioritize`` in ATen/autocast_mode.h):
starting from the low dtype, each castable ``Tensor`` or ``Tensor[]`` argument may raise it to float32; a
floating dtype that is neither raises an error unless float32 was seen before it.  Optional tensors take no
part in the decision, but are cast.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch.fx import Graph, Node

from fxamp.errors import PolicyError
from fxamp.ir.facts import fact_of_node
from fxamp.ir.operators import tensor_arguments
from fxamp.ir.where import locate
from fxamp.passes.base import Pass
from fxamp.passes.classify import castable
from fxamp.policy import Policy

__all__ = ["ResolvePromotes"]


@dataclass(frozen=True)
class ResolvePromotes(Pass):
    """Every decision has a target."""

    name: ClassVar[str] = "resolve-promotes"
    policy: Policy

    def run(self, graph: Graph) -> bool:
        changed = False
        for node in graph.nodes:
            decision = node.meta.get("decision")
            if decision is not None and decision.target is None:
                node.meta["decision"] = replace(decision, target=self._join(node))
                changed = True
        return changed

    def _join(self, node: Node) -> torch.dtype:
        low: torch.dtype = node.meta["region"].dtype
        joined = low
        for value in tensor_arguments(node, optional=False):
            for item in value if isinstance(value, (list, tuple)) else [value]:
                fact = fact_of_node(item)
                if fact is not None and castable(fact, self.policy):
                    joined = self._wider(joined, fact.dtype, low, node)
        return joined

    def _wider(self, joined: torch.dtype, dtype: torch.dtype, low: torch.dtype, node: Node) -> torch.dtype:
        if torch.float32 in (joined, dtype):
            return torch.float32
        if joined is low and dtype is low:
            return low
        raise PolicyError(
            f"Unexpected floating ScalarType in at::autocast::prioritize: {dtype} where the region's dtype "
            f"is {low}, at {locate(node)}\n  cast it yourself:  x.float() or x.to({low})"
        )
