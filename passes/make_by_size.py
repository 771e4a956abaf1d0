"""Make a tensor of known size by its size, not like another tensor.

Before: ``x.new_zeros(4, 4)`` and ``torch.zeros_like(x)`` hang on *x*, of which they read no element.
After:  where their size is known they are ``zeros([4, 4])`` of the same dtype on the same device, which is
        the same in every call, and *x* may be freed before.

Left as it is: what does not lie in memory row by row.  Training-exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from fxamp.ir.facts import Fact, fact_of_node
from fxamp.ir.operators import arguments_in_order
from fxamp.passes.base import Pass

__all__ = ["MakeBySize"]

aten = torch.ops.aten

_BY_SIZE: Mapping[object, OpOverload] = MappingProxyType({
    # like another               by its size
    aten.new_zeros.default:      aten.zeros.default,
    aten.new_ones.default:       aten.ones.default,
    aten.new_full.default:       aten.full.default,
    aten.zeros_like.default:     aten.zeros.default,
    aten.ones_like.default:      aten.ones.default,
    aten.full_like.default:      aten.full.default,
})  # fmt: skip


@dataclass(frozen=True)
class MakeBySize(Pass):
    """No tensor of known size is made like another one."""

    name: ClassVar[str] = "make-by-size"

    def run(self, graph: Graph) -> bool:
        changed = False
        for node in graph.nodes:
            target, fact = _BY_SIZE.get(node.target), fact_of_node(node)
            if target is None or fact is None or not _is_by_rows(node, fact):
                continue
            given = {argument.name: value for argument, value in arguments_in_order(node)}
            values = [given["fill_value"]] if "fill_value" in given else []
            node.target = target
            node.args = (list(fact.shape), *values)
            node.kwargs = {"dtype": fact.dtype, "device": fact.device, "pin_memory": False}  # as torch.zeros
            changed = True
        return changed


def _is_by_rows(node: Node, fact: Fact) -> bool:
    """Whether the result is of known size and contiguous, in dense memory of the usual kind."""
    value = node.meta.get("val")
    if not all(isinstance(size, int) for size in fact.shape) or not isinstance(value, torch.Tensor):
        return False
    given = {argument.name: value for argument, value in arguments_in_order(node)}
    usual = not given.get("pin_memory") and given.get("layout") in (None, torch.strided)
    return usual and value.layout is torch.strided and value.is_contiguous()
