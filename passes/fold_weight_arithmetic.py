"""Compute once what depends on weights and constants alone, in a module whose weights do not change.

Before: each call standardises a weight, joins biases, gathers a table of positions, and casts the result.
After:  the graph reads the result as a tensor of its own.  What it was computed from, by which operators, is
        in the new node's ``meta["derived"]``.

A value is *fixed* if it is a weight or a constant that nobody writes to, or if an operator that gives the
same bits each time (``ir/repeatable.py``) makes it of fixed values, or of none (``arange(8)``), with numbers
that are the same in every call.  It is *kept* if, besides,

* something that is not fixed reads it, perhaps through views, which stay in the graph: a view is no
  arithmetic;
* it is memory of its own, that nobody writes to and no output of the graph has: what the user is given is
  new in every call;
* it is no larger than ``SMALL``, or than what is left of the weights and constants that it is made of, once
  those that are kept already have taken their bytes from them.

So the tensors that are kept take at most as many bytes as those that they are made of, and ``SMALL`` for each
more.  A value that is too large (``bias.expand(rows, columns) * 2``) stays in the graph, and what it is made of
may be kept.  The cast behind a computation is a part of it, so the weight is kept in the dtype that is used.

The bits are those of the same kernels, with the number of threads and the flags of the back ends that are set
when it is computed.  No gradient reaches the weights any more: inference-exact.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from fxamp.ir.blocks import is_source
from fxamp.ir.derivation import Derivation, above, derivation_of
from fxamp.ir.edits import note_edit
from fxamp.ir.facts import Fact, Facts, fact_of_node
from fxamp.ir.memory import Memory
from fxamp.ir.repeatable import is_repeatable
from fxamp.ir.scalars import is_flushed, overflows, scalar_arguments
from fxamp.passes.base import Pass
from fxamp.passes.fold_weight_casts import drop_switches

__all__ = ["SMALL", "FoldWeightArithmetic"]

SMALL = 1 << 16
"""Bytes that a value may always have."""


@dataclass(frozen=True)
class FoldWeightArithmetic(Pass):
    """No operator is left whose result is known before the call and is worth its memory.

    Attributes:
        fixed: The targets of the ``get_attr`` nodes that are weights, rounded copies of weights, or constants,
            which nothing writes to.
    """

    name: ClassVar[str] = "fold-weight-arithmetic"
    fixed: frozenset[str]

    def run(self, graph: Graph) -> bool:
        memory = Memory(graph)
        kept = _kept(graph, memory, self._fixed(graph, memory))
        derivations = [derivation_of(node, memory.order) for node in kept]
        parts = {part: node.name for node in reversed(kept) for part in above(node)}
        made: dict[Any, Node] = {}
        for node, derivation in zip(kept, derivations, strict=True):
            key = derivation.key, derivation.sources
            if key not in made:
                made[key] = _tensor(graph, node, derivation)
            node.replace_all_uses_with(made[key])
        for node in sorted(parts, key=memory.order.__getitem__, reverse=True):
            if not node.users:
                self._erase(graph, node, f"computed once, for %{parts[node]}")
        return drop_switches(graph) or bool(kept)

    def _erase(self, graph: Graph, node: Node, what: str) -> None:
        if node.op == "call_function":
            note_edit(graph, node, self.name, "inference-exact", what, "the weights do not change")
        graph.erase_node(node)

    def _fixed(self, graph: Graph, memory: Memory) -> set[Node]:
        """The nodes whose values are the same in every call."""
        fixed: set[Node] = set()
        for node in graph.nodes:
            if memory.is_written(node):
                continue
            if (is_source(node) and str(node.target) in self.fixed) or (
                _gives_the_same(node) and fixed.issuperset(node.all_input_nodes)
            ):
                fixed.add(node)
        return fixed


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
    """Whether low precision lacks a number that *node* computes with: exporters tell of it, by the operator."""
    fact = fact_of_node(node)
    if fact is None or fact.dtype not in (torch.float16, torch.bfloat16):
        return False
    numbers = [number for _, number in scalar_arguments(target, node.args, node.kwargs)]
    return any(overflows(number, fact.dtype) or is_flushed(number, fact.dtype) for number in numbers)


# --- which values are kept ----------------------------------------------------------------------------


def _kept(graph: Graph, memory: Memory, fixed: set[Node]) -> list[Node]:
    """The nodes whose values become tensors that the graph reads, in order."""
    room = _room(graph)
    read: set[Node] = set()
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if node in fixed and (node not in read or is_source(node)):
            continue
        if node in fixed and _is_new(node, memory) and memory.is_private(node) and _takes(node, room):
            kept.append(node)
        else:
            read.update(node.all_input_nodes)
    return kept[::-1]


def _room(graph: Graph) -> dict[str, int]:
    """How many bytes may be kept of what is made of each source."""
    room: dict[str, int] = {}
    derived = [node for node in graph.nodes if "derived" in node.meta]
    for node in filter(is_source, graph.nodes):
        room[str(node.target)] = _bytes(node)
    for node in derived:
        for given in node.meta["derived"].graph.find_nodes(op="get_attr"):
            room.setdefault(str(given.target), _bytes(given))
    for node in derived:
        _take(_bytes(node), node.meta["derived"].sources, room)
    return room


def _is_new(node: Node, memory: Memory) -> bool:
    """Whether *node* is one tensor, in memory that none of its inputs has."""
    if fact_of_node(node) is None:
        return False
    call = node.args[0] if node.target is operator.getitem else node
    assert isinstance(call, Node)
    return all(memory.group(given) is not memory.group(call) for given in call.all_input_nodes)


def _takes(node: Node, room: dict[str, int]) -> bool:
    """Whether the value of *node* is worth its memory; then it takes that from the *room* of its sources."""
    size = _bytes(node)
    if size <= SMALL:
        return True
    sources = [str(given.target) for given in above(node) if given.op == "get_attr"]
    if size > sum(room[target] for target in sources):
        return False
    _take(size, sources, room)
    return True


def _take(size: int, sources: Any, room: dict[str, int]) -> None:
    if size <= SMALL:
        return
    for target in sorted(sources):
        taken = min(size, room[target])
        room[target] -= taken
        size -= taken


def _bytes(node: Node) -> int:
    fact = fact_of_node(node)
    size = fact.bytes if fact is not None else 0
    return size if isinstance(size, int) else 0


# --- the rewrite --------------------------------------------------------------------------------------


def _tensor(graph: Graph, node: Node, derivation: Derivation) -> Node:
    """The source that stands for *node* from now on."""
    taken = {str(source.target) for source in graph.find_nodes(op="get_attr")}
    target = next(name for name in _names(derivation, node.meta["fact"]) if name not in taken)
    with graph.inserting_before(node):
        tensor = graph.create_node("get_attr", target, name=f"{node.name}_once")
    fact = replace(node.meta["fact"], leaf=False, requires_grad=False)
    tensor.meta.update(fact=fact, derived=derivation, where=node.meta.get("where"))
    if "val" in node.meta:
        tensor.meta["val"] = node.meta["val"]
    return tensor


def _names(derivation: Derivation, fact: Fact) -> Iterator[str]:
    """What to call the tensor: after the largest weight that it is made of, or its dtype."""
    given = max(derivation.graph.find_nodes(op="get_attr"), key=_bytes, default=None)
    stem = f"_folded_{fact.dtype.abbr}" if given is None else f"{given.target}_folded"
    yield stem
    number = 1
    while True:
        yield f"{stem}_{number}"
        number += 1

