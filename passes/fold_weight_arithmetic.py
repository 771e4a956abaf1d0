"""Compute once what depends on weights, buffers and constants alone, in a module where these do not change.

Before: each call standardises a weight, joins biases, gathers a table of positions, and casts the result.
After:  the graph reads the result as a tensor of its own.  What it was computed from, by which operators, is
        in the new node's ``meta["derived"]``.

A value that is the same in every call (``fixed_values.py``) is *kept* if, besides,

* something that is not fixed reads it, perhaps through views, which stay in the graph: a view is no
  arithmetic;
* it is memory of its own.  Where an output of the graph has it, the graph has a clone: what the user is given
  is new in every call, and so is what the next segment of a call may write to;
* where it is written to on the way, nothing that stays reads it before it is as it is in the end;
* it is no larger than ``SMALL``, or than what is left of the weights, buffers and constants that it is made
  of, and of a fiftieth of all that the graph reads, once those that are kept already have taken their bytes
  from them.

So the tensors that are kept take at most as many bytes as those that they are made of, a fiftieth of all
weights, and ``SMALL`` more for each.  A value that is too large (``bias.expand(rows, columns) * 2``) stays in
the graph, and what it is made of may be kept.  The cast behind a computation is a part of it, so what is kept
has the dtype that is used.

The bits are those of the same kernels, with the number of threads and the flags of the back ends that are set
when it is computed.  No gradient reaches the weights any more: inference-exact.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from fxamp.ir.blocks import is_source
from fxamp.ir.derivation import Derivation, derivation_of
from fxamp.ir.edits import note_edit
from fxamp.ir.facts import Fact, fact_of_node
from fxamp.ir.layouts import layout_of
from fxamp.ir.memory import Memory
from fxamp.passes.base import Pass
from fxamp.passes.fixed_values import FixedValues
from fxamp.passes.fold_weight_casts import drop_switches

__all__ = ["SMALL", "FoldWeightArithmetic"]

SMALL = 1 << 16
"""Bytes that a value may always have."""
SHARE = 50
"""One in so many bytes of what a graph reads may be taken besides: for the biases of swin's windows, say."""


@dataclass(frozen=True)
class FoldWeightArithmetic(Pass):
    """No operator is left whose result is known before the call and is worth its memory.

    Attributes:
        fixed: The targets of the ``get_attr`` nodes that are weights, rounded copies of weights, buffers or
            constants.
            constants.
    """

    name: ClassVar[str] = "fold-weight-arithmetic"
    fixed: frozenset[str]

    def run(self, graph: Graph) -> bool:
        memory = Memory(graph, recorded=True)  # behind all passes that move casts
        fixed, kept, changed = _choice(graph, memory, self.fixed)
        made: dict[Any, Node] = {}
        parts: dict[Node, str] = {}
        derivations = [_derivation(node, fixed, memory, parts) for node in kept]
        for node, derivation in zip(kept, derivations, strict=True):
            key = derivation.key, derivation.sources
            if key not in made:
                made[key] = _tensor(graph, node, derivation)
            tensor = made[key]
            node.replace_all_uses_with(_clone(graph, node, tensor) if memory.escapes(node) else tensor)
        for node in sorted(parts, key=memory.order.__getitem__, reverse=True):
            if not node.users:
                self._erase(graph, node, f"computed once, for %{parts[node]}")
        return drop_switches(graph) or bool(kept) or changed

    def _erase(self, graph: Graph, node: Node, what: str) -> None:
        if node.op == "call_function":
            note_edit(graph, node, self.name, "inference-exact", what, "the weights do not change")
        graph.erase_node(node)


# --- which values are kept ----------------------------------------------------------------------------


def _choice(graph: Graph, memory: Memory, sources: frozenset[str]) -> tuple[FixedValues, list[Node], bool]:
    """The fixed values, those that become tensors which the graph reads, and whether writes were skipped."""
    spoilt: set[Node] = set()
    skipped = False
    while True:
        fixed = FixedValues(graph, memory, sources, spoilt)
        skipped |= fixed.skip_writes()
        kept, needed = _kept(graph, memory, fixed)
        if not needed:
            return fixed, kept, skipped
        spoilt |= needed


def _kept(graph: Graph, memory: Memory, fixed: FixedValues) -> tuple[list[Node], set[Node]]:
    """The values that are kept, in order; and the groups of local memory that have to stay."""
    room = _room(graph)
    read: set[Node] = set()
    kept: list[Node] = []
    needed: set[Node] = set()
    for node in reversed(graph.nodes):
        if node in fixed and (node not in read or is_source(node)):
            continue
        if node in fixed and _may_be_kept(node, memory):
            sources = (str(part.target) for part in fixed.behind(node) if part.op == "get_attr")
            if room.take(_bytes(node), sources):
                kept.append(node)
                continue
        needed.update(_needed(node, memory, fixed))
        read.update(node.all_input_nodes)
    return kept[::-1], needed


def _may_be_kept(node: Node, memory: Memory) -> bool:
    """Whether *node* is one tensor, in memory that none of its inputs has."""
    if fact_of_node(node) is None or (memory.escapes(node) and not _is_cloned_as_it_lies(node, memory)):
        return False
    call = node.args[0] if node.target is operator.getitem else node
    assert isinstance(call, Node)
    return all(memory.group(given) is not memory.group(call) for given in call.all_input_nodes)


def _is_cloned_as_it_lies(node: Node, memory: Memory) -> bool:
    """Whether a clone of *node* is like it, and less work than *node* itself."""
    layout = layout_of(node)
    computes = bool(node.all_input_nodes) and node.target is not torch.ops.aten.clone.default
    return computes and layout is not None and layout.dense and not memory.is_written(node)


def _needed(node: Node, memory: Memory, fixed: FixedValues) -> Iterator[Node]:
    """The groups of local memory that have to stay, writes and all, if *node* does."""
    if node in fixed and memory.is_written(node) and not _is_alias(node, memory):
        yield memory.group(node)
    for given in node.all_input_nodes:
        reads = given in fixed and memory.is_written(given) and memory.group(given) is not memory.group(node)
        if reads and memory.order[node] < memory.last_write(given):  # of what is kept it is too early
            yield memory.group(given)


def _is_alias(node: Node, memory: Memory) -> bool:
    return any(memory.group(given) is memory.group(node) for given in node.all_input_nodes)


@dataclass
class _Room:
    """How many bytes may still be kept: of what is made of each source, and besides."""

    of: dict[str, int]
    besides: int

    def take(self, size: int, sources: Iterable[str]) -> bool:
        """Take *size* bytes if there are as many, those of the *sources* first."""
        given = sorted(set(sources))
        if size <= SMALL:
            return True
        if size > sum(self.of[target] for target in given) + self.besides:
            return False
        for target in given:
            taken = min(size, self.of[target])
            self.of[target] -= taken
            size -= taken
        self.besides -= size
        return True


def _room(graph: Graph) -> _Room:
    derived = [node for node in graph.nodes if "derived" in node.meta]
    given = [source for node in derived for source in node.meta["derived"].graph.find_nodes(op="get_attr")]
    read = [node for node in graph.nodes if is_source(node) and "derived" not in node.meta]
    of = {str(node.target): _bytes(node) for node in (*read, *given)}
    room = _Room(of, sum(of.values()) // SHARE)
    for node in derived:
        room.take(_bytes(node), node.meta["derived"].sources)
    room.of |= {str(node.target): _bytes(node) for node in derived}
    return room


def _bytes(node: Node) -> int:
    fact = fact_of_node(node)
    size = fact.bytes if fact is not None else 0
    return size if isinstance(size, int) else 0


# --- the rewrite --------------------------------------------------------------------------------------


def _derivation(node: Node, fixed: FixedValues, memory: Memory, parts: dict[Node, str]) -> Derivation:
    """How *node* is computed; what may go with it is added to *parts*, with its name."""
    behind = fixed.behind(node)
    later = [write for part in behind if memory.is_written(part) for write in fixed.writes_to(part)]
    for part in behind.union(*map(fixed.behind, later)):
        parts.setdefault(part, node.name)
    return derivation_of(node, sorted(behind, key=memory.order.__getitem__))


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


def _clone(graph: Graph, node: Node, tensor: Node) -> Node:
    """What stands for *node* where the user, or the next segment, is given it."""
    with graph.inserting_before(node):
        clone = graph.call_function(torch.ops.aten.clone.default, (tensor,), name=f"{node.name}_own")
    clone.meta.update({key: node.meta[key] for key in ("region", "grad", "where", "val") if key in node.meta})
    clone.meta["fact"] = tensor.meta["fact"]
    return clone


def _names(derivation: Derivation, fact: Fact) -> Iterator[str]:
    """What to call the tensor: after the largest weight that it is made of, or its dtype."""
    given = max(derivation.graph.find_nodes(op="get_attr"), key=_bytes, default=None)
    stem = f"_folded_{fact.dtype.abbr}" if given is None else f"{given.target}_folded"
    yield stem
    number = 1
    while True:
        yield f"{stem}_{number}"
        number += 1
