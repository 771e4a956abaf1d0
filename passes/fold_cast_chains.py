"""Fold a cast of a cast into one, or into none, where nothing is lost in the middle.

Before: ``x16.float().to(bfloat16)`` and ``x16.float().double()`` are two casts.
After:  the first is ``x16`` itself, the second one cast of ``x16``.

Condition: the dtype in the middle holds every value of the first one, so that only the last cast rounds
(bfloat16 to float16 and back is not such a chain; nor is float32 through a half).  The bits are the same but
for the payload of signalling NaNs.  Where ``x16`` itself takes the place of a copy, nobody may write to
either, and no output may have them.  With a gradient the chain must besides have no other users: an only
user's gradient goes through both casts unchanged, and nothing is added up in another dtype or order.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch.fx import Graph, Node

from fxamp.ir.memory import Memory
from fxamp.ir.operators import is_plain_cast
from fxamp.passes.clean_up import CleanUp, takes_part_in_gradient

__all__ = ["FoldCastChains", "holds"]

_HELD = MappingProxyType(
    {
        torch.bfloat16: frozenset({torch.bfloat16}),
        torch.float16: frozenset({torch.float16}),
        torch.float32: frozenset({torch.bfloat16, torch.float16, torch.float32}),
        torch.float64: frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64}),
    }
)


def holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether every value of *other* is a value of *dtype*.

    Example:
        >>> holds(torch.float32, torch.float16), holds(torch.bfloat16, torch.float16)
        (True, False)
    """
    return other in _HELD.get(dtype, ())


@dataclass(frozen=True)
class FoldCastChains(CleanUp):
    """No cast is of the result of a cast that lost nothing, if the level lets the two be folded."""

    name: ClassVar[str] = "fold-cast-chains"
    condition: ClassVar[str] = "the dtype in the middle holds every value of the first"

    def run(self, graph: Graph) -> bool:
        seconds = [node for node in graph.nodes if _is_second(node)]
        if not seconds:
            return False
        memory, changed = Memory(graph), False
        for second in seconds:
            middle = second.args[0]
            assert isinstance(middle, Node)
            if _is_second(second) and self.may_fold(middle, second, memory):
                changed = True
                self._fold(graph, middle, second)
        return changed

    def may_fold(self, middle: Node, second: Node, memory: Memory) -> bool:
        """Whether *second*, a cast of *middle*, which is a cast too, may be one of what *middle* casts."""
        source = middle.args[0]
        assert isinstance(source, Node)
        first, last = source.meta["fact"].dtype, second.meta["fact"].dtype
        if not self.holds(middle.meta["fact"].dtype, first) or middle.meta.get("kept"):
            return False
        if not self.keeps_gradients(source, middle, second):
            return False
        if first is last:
            return all(map(memory.is_private, (second, middle))) and not memory.is_written(source)
        return memory.is_private(middle) and not memory.is_written(source)

    def holds(self, middle: torch.dtype, first: torch.dtype) -> bool:
        """Whether nothing is lost by a cast from *first* to *middle*."""
        return holds(middle, first)

    def keeps_gradients(self, source: Node, middle: Node, second: Node) -> bool:
        """Whether no gradient flows through the chain, or goes through it unchanged."""
        flows = [takes_part_in_gradient(node.meta["fact"]) for node in (source, middle, second)]
        if not any(flows):
            return True
        only = len(source.users) == 1 and len(middle.users) == 1
        return all(flows) and only and source.meta["fact"].dtype is second.meta["fact"].dtype

    def _fold(self, graph: Graph, middle: Node, second: Node) -> None:
        source = middle.args[0]
        assert isinstance(source, Node)
        if source.meta["fact"].dtype is second.meta["fact"].dtype:
            self.note(graph, second, f"is %{source.name}, which it gave back")
            second.replace_all_uses_with(source)
            graph.erase_node(second)
        else:
            self.note(graph, middle, f"left out between %{source.name} and %{second.name}")
            second.update_arg(0, source)
        if not middle.users:
            graph.erase_node(middle)


def _is_second(node: Node) -> bool:
    return is_plain_cast(node) and isinstance(node.args[0], Node) and is_plain_cast(node.args[0])
