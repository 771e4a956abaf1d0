"""Leave out the two casts around an operator that rounds as they do: ``op(x.float()).to(low)`` is ``op(x)``.

Before: an operator that a model, or the policy, wants in float32 stands between two casts of one low dtype.
After:  it works on the low dtype, where its kernel on this very device gives the same for all 65,536 values.

Exact for inference; in training its gradient would be computed from other saved values, so values that a
gradient reaches are left alone.  Condition: the operator treats each element by itself, the check of
``sandwich_table.py`` passes for it on the device, with the very arguments that it has, nothing else reads
what it gives in float32, nobody writes to the memory concerned and no output has it.  A forward-mode
tangent that is pushed through such a program may be rounded differently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from fxamp.ir.memory import Memory
from fxamp.ir.operators import is_plain_cast
from fxamp.passes.clean_up import CleanUp, takes_part_in_gradient
from fxamp.passes.sandwich_table import Call, is_elementwise, is_exact_on_device

__all__ = ["RemoveSandwiches"]

_PLAIN = (bool, int, float, str, type(None))
_OF_THE_CALL = ("val", "number", "decision", "carried_out", "layout")


@dataclass(frozen=True)
class RemoveSandwiches(CleanUp):
    """No operator that is known to round as the casts around it do has both of them."""

    name: ClassVar[str] = "remove-sandwiches"
    condition: ClassVar[str] = "checked on this device for all values of the low dtype"

    def run(self, graph: Graph) -> bool:
        found = [node for node in graph.nodes if _filling(node) is not None]
        if not found:
            return False
        memory, changed = Memory(graph), False
        for last in found:
            middle = _filling(last)
            if middle is not None and self.may_remove(middle, last, memory):
                changed = True
                self._remove(graph, middle, last)
        return changed

    def may_remove(self, middle: Node, last: Node, memory: Memory) -> bool:
        """Whether *middle* may work on what its argument is cast from, and its cast *last* be left out."""
        first = middle.args[0]
        assert isinstance(first, Node)
        source = first.args[0]
        assert isinstance(source, Node)
        if any(takes_part_in_gradient(node.meta["fact"]) for node in (source, first, middle, last)):
            return False
        still = all(map(memory.is_private, (first, middle, last)))
        if not still or memory.is_written_between(source, first, middle):
            return False
        return self.rounds_alike(middle, last)

    def rounds_alike(self, middle: Node, last: Node) -> bool:
        """Whether the operator gives in the low dtype what the two casts around it give."""
        fact = last.meta["fact"]
        assert isinstance(middle.target, OpOverload)
        call = Call(middle.target, tuple(middle.args[1:]), tuple(middle.kwargs.items()))
        return is_exact_on_device(call, fact.dtype, fact.device)

    def _remove(self, graph: Graph, middle: Node, last: Node) -> None:
        first = middle.args[0]
        assert isinstance(first, Node)
        with graph.inserting_before(middle):
            inner = graph.node_copy(middle, lambda node: first.args[0] if node is first else node)
        inner.meta = {key: value for key, value in middle.meta.items() if key not in _OF_THE_CALL}
        inner.meta["fact"] = last.meta["fact"]
        self.note(graph, last, f"left out behind %{middle.name}, which rounds alike")
        last.replace_all_uses_with(inner)
        graph.erase_node(last)
        graph.erase_node(middle)
        if not first.users:
            self.note(graph, first, f"left out before %{inner.name}, which works on {first.args[0]}")
            graph.erase_node(first)


def _filling(last: Node) -> Node | None:
    """The operator in the middle if *last* is the last cast of a sandwich."""
    middle = last.args[0] if is_plain_cast(last) else None
    if not isinstance(middle, Node) or not is_elementwise(middle.target) or len(middle.users) != 1:
        return None
    first, *others = middle.args
    if not isinstance(first, Node) or not is_plain_cast(first):
        return None
    if not all(isinstance(value, _PLAIN) for value in (*others, *middle.kwargs.values())):
        return None
    fact, source = last.meta["fact"], first.args[0]
    assert isinstance(source, Node)
    several = any(size != 1 for size in fact.shape)  # kernels have a path of its own for a single number
    low = (
        several and fact.dtype in (torch.bfloat16, torch.float16) and source.meta["fact"].dtype is fact.dtype
    )
    high = middle.meta["fact"].dtype is first.meta["fact"].dtype is torch.float32
    return middle if low and high else None
