"""Which values of a graph are the same in every call: those that depend on weights and constants alone.

A weight or constant that nobody writes to is fixed.  So is what an operator that gives the same bits each
time (``ir/repeatable.py``) makes of fixed values, or of none (``arange(8)``), with numbers that are the same
in every call.

Memory may be written to where all of it is local: every value in it is fixed, what is written is, and no
output of the graph has it (``mask = ones(8, 8); mask.tril_()``).  Its values change on the way, but in the
same way in every call.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from itertools import repeat

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from fxamp.ir.blocks import is_source
from fxamp.ir.facts import Fact, Facts, fact_of_node
from fxamp.ir.memory import Memory
from fxamp.ir.operators import is_composite, is_write
from fxamp.ir.repeatable import is_repeatable
from fxamp.ir.scalars import is_flushed, overflows, scalar_arguments

__all__ = ["FixedValues"]


class FixedValues:
    """The fixed values of *graph*.

    Args:
        graph: A rewritten graph.
        memory: Which of its values share memory.
        sources: The targets of the ``get_attr`` nodes that are fixed if the graph does not write to them.
        spoilt: The groups of memory that are not to be taken for local.

    Attributes:
        nodes: The nodes that have them.
    """

    def __init__(
        self, graph: Graph, memory: Memory, sources: Collection[str], spoilt: Iterable[Node] = ()
    ) -> None:
        self._memory = memory
        spoilt = {*spoilt, *(memory.group(node) for node in graph.nodes if memory.escapes(node))}
        self.nodes = self._found(graph, sources, spoilt)
        while new := {memory.group(node) for node in graph.nodes if self._spoils(node)} - spoilt:
            spoilt |= new
            self.nodes = self._found(graph, sources, spoilt)
        self._writes = [node for node in graph.nodes if node in self.nodes and is_write(node)]

    def __contains__(self, node: Node) -> bool:
        return node in self.nodes

    def behind(self, result: Node) -> set[Node]:
        """*result* and all that its value comes from; of memory that is written to, what it is in the end."""
        memory, found, waiting = self._memory, set[Node](), [result]
        end = memory.last_write(result) if memory.is_written(result) else memory.order[result]
        while waiting:
            node = waiting.pop()
            if node in found:
                continue
            found.add(node)
            waiting += node.all_input_nodes
            if memory.is_written(node):
                waiting += [write for write in self.writes_to(node) if memory.order[write] <= end]
        return found

    def writes_to(self, node: Node) -> list[Node]:
        """The operators that write to the local memory of *node*."""
        group = self._memory.group(node)
        return [write for write in self._writes if self._memory.group(write) is group]

    def skip_writes(self) -> bool:
        """Let what reads the result of a write read what was written to: they are one tensor."""
        read = [node for node in self._writes if node.users]
        for node in read:
            node.replace_all_uses_with(_target(node))
        return bool(read)

    def _found(self, graph: Graph, sources: Collection[str], spoilt: set[Node]) -> set[Node]:
        found: set[Node] = set()
        for node in graph.nodes:
            if self._memory.is_written(node) and (self._memory.group(node) in spoilt or is_source(node)):
                continue
            if is_source(node):
                if node.target in sources:
                    found.add(node)
            elif found.issuperset(node.all_input_nodes) and _gives_the_same(node):
                found.add(node)
        return found

    def _spoils(self, node: Node) -> bool:
        """Whether *node* is in memory that is written to, and is not fixed itself, or perhaps a copy."""
        if not self._memory.is_written(node):
            return False
        return node not in self.nodes or not all(map(self._is_sure, repeat(node), node.all_input_nodes))

    def _is_sure(self, node: Node, given: Node) -> bool:
        """Whether it is certain that *node* shares memory with its input *given*, or that it does not."""
        if self._memory.group(node) is not self._memory.group(given):
            return True
        if isinstance(node.target, OpOverload) and not is_composite(node.target):
            return True  # a composite one may say that it gives a view, and give a copy
        return not _storages(node).isdisjoint(_storages(given))


def _gives_the_same(node: Node) -> bool:
    """Whether *node* has the same result for the same tensors, of a size that is known."""
    if node.op != "call_function" or not _is_sized(node.meta.get("fact")):
        return False
    if not isinstance(node.target, OpOverload):
        return node.target is operator.getitem
    return is_repeatable(node.target) and not _loses_a_number(node, node.target)


def _is_sized(facts: Facts) -> bool:
    if isinstance(facts, Fact):
        return all(isinstance(size, int) for size in facts.shape)
    return isinstance(facts, tuple) and bool(facts) and all(map(_is_sized, facts))


def _loses_a_number(node: Node, target: OpOverload) -> bool:
    """Whether low precision lacks a number that *node* computes with, which exporters tell of."""
    fact = fact_of_node(node)
    if fact is None or fact.dtype not in (torch.float16, torch.bfloat16):
        return False
    numbers = [number for _, number in scalar_arguments(target, node.args, node.kwargs)]
    return any(overflows(number, fact.dtype) or is_flushed(number, fact.dtype) for number in numbers)


def _storages(node: Node) -> set[int]:
    """The memories of the fake tensors that were recorded for *node*; none where there is no record."""
    values = pytree.tree_leaves(node.meta.get("val"))
    return {value.untyped_storage()._cdata for value in values if isinstance(value, torch.Tensor)}


def _target(write: Node) -> Node:
    target = write.args[0]
    assert isinstance(target, Node)
    return target
