"""Join the casts of slices that lie apart into one that lays them out one behind another.

Before: ``x[:, t]`` is cast for every step ``t`` of a sequence, batch first.
After:  ``x`` is cast once, with the steps outermost in memory, and each step is a slice of that.

``place-casts`` cannot do it: the rows of ``x[:, t]`` have gaps in between, a cast packs them, and a slice of
a cast ``x`` would have the gaps again.  Here the one cast packs them as well: its result has each slice in
one piece, with the strides that the cast of the slice had.

Exact for inference; values that a gradient reaches are left alone.  Condition: ``x`` lies in memory in the
order of its dimensions, nobody writes to it or to the casts, no output has them, and each slice begins where
a fresh allocation might.  It is done where it moves fewer bytes and starts fewer kernels, by the prices of
``place-casts``.
"""

from __future__ import annotations

import operator
import sys
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, ClassVar

import torch
from torch.fx import Graph, Node

from fxamp.ir.facts import Fact
from fxamp.ir.layouts import Layout, layout_of
from fxamp.ir.memory import Memory
from fxamp.ir.operators import TO_DTYPE, is_plain_cast
from fxamp.passes.clean_up import CleanUp, takes_part_in_gradient
from fxamp.passes.placements import Prices

__all__ = ["JoinSliceCasts"]

_ATEN = torch.ops.aten


@dataclass(frozen=True)
class _Slice:
    """One cast of one slice.

    Attributes:
        cast: The cast.
        whole: What the slice is of.
        dimension: Which dimension is left out.
        index: Where.
    """

    cast: Node
    whole: Node
    dimension: int
    index: int


@dataclass(frozen=True)
class JoinSliceCasts(CleanUp):
    """No value has so many slices cast one by one that one cast of all of it would be cheaper.

    Attributes:
        prices: What casts cost.
    """

    name: ClassVar[str] = "join-slice-casts"
    condition: ClassVar[str] = "each slice is in one piece as before, and nobody writes"
    prices: Prices = field(default_factory=Prices)

    def run(self, graph: Graph) -> bool:
        groups: dict[Any, list[_Slice]] = {}
        for node in graph.nodes:
            found = _slice_of(node)
            if found is not None:
                key = (found.whole, found.dimension, node.meta["fact"].dtype)
                groups.setdefault(key, []).append(found)
        several = [group for group in groups.values() if len(group) > 1]
        if not several:
            return False
        memory = Memory(graph)
        joined = [self._join(graph, group) for group in several if self.may_join(group, memory)]
        return any(joined)

    def may_join(self, slices: list[_Slice], memory: Memory) -> bool:
        """Whether *slices*, of one value, may be cast together."""
        whole = slices[0].whole
        if memory.is_written(whole) or takes_part_in_gradient(whole.meta["fact"]):
            return False
        return all(memory.is_private(each.cast) and self.is_laid_out_alike(each) for each in slices)

    def is_laid_out_alike(self, each: _Slice) -> bool:
        """Whether the slice lies in the joint cast as it does in its own."""
        layout, source = layout_of(each.whole), each.cast.args[0]
        assert isinstance(source, Node)
        inner = layout_of(source)
        if layout is None or inner is None or not layout.is_contiguous or inner.dense or 1 in inner.shape:
            return False
        size = prod(inner.shape, start=1)
        return replace(inner, offset=size).is_aligned(each.cast.meta["fact"].dtype)

    def _join(self, graph: Graph, slices: list[_Slice]) -> bool:
        whole, low = slices[0].whole, slices[0].cast.meta["fact"].dtype
        count, part = _count(whole), _count(slices[0].cast)
        width = whole.meta["fact"].dtype.itemsize + low.itemsize
        if self.prices.launch + count * width >= len(slices) * (self.prices.launch + part * width):
            return False
        joint = self._cast(graph, slices[0], low)
        rows: dict[int, Node] = {}
        for each in slices:
            if each.index not in rows:
                with graph.inserting_before(each.cast):
                    rows[each.index] = graph.call_function(_ATEN.select.int, (joint, 0, each.index))
                self._describe(rows[each.index], each, each.cast.meta["fact"])
            self.note(graph, each.cast, f"joined with those of other slices in %{joint.name}")
            each.cast.replace_all_uses_with(rows[each.index])
            graph.erase_node(each.cast)
        return True

    def _cast(self, graph: Graph, first: _Slice, low: torch.dtype) -> Node:
        fact: Fact = first.whole.meta["fact"]
        sizes = list(fact.shape)
        sizes.insert(0, sizes.pop(first.dimension))
        moved = replace(fact, shape=tuple(sizes), leaf=False)
        with graph.inserting_before(first.cast):
            steps = graph.call_function(_ATEN.movedim.int, (first.whole, first.dimension, 0))
            packed = (steps, low, False, False, torch.contiguous_format)
            joint = graph.call_function(TO_DTYPE, packed)
        self._describe(steps, first, moved)
        self._describe(joint, first, replace(moved, dtype=low))
        if "inserted" in first.cast.meta:
            joint.meta["inserted"] = first.cast.meta["inserted"]
        joint._rename(f"{first.whole.name}_{low.abbr}")
        return joint

    def _describe(self, node: Node, like: _Slice, fact: Fact) -> None:
        node.meta.update({key: like.cast.meta.get(key) for key in ("region", "grad", "where")}, fact=fact)


def _slice_of(cast: Node) -> _Slice | None:
    """*cast* if it is of ``x.select(dimension, index)``, or of one of ``x.unbind(dimension)``."""
    source = cast.args[0] if is_plain_cast(cast) and not cast.meta.get("kept") else None
    if not isinstance(source, Node) or source.kwargs:
        return None
    if source.target is _ATEN.select.int:
        whole, dimension, index = source.args
    elif source.target is operator.getitem and getattr(source.args[0], "target", None) is _ATEN.unbind.int:
        unbound, index = source.args
        whole, dimension = (*unbound.args, 0)[:2]  # type: ignore[union-attr]
    else:
        return None
    while isinstance(whole, Node) and _is_all_of_it(whole):
        whole = whole.args[0]
    fact = whole.meta.get("fact") if isinstance(whole, Node) else None
    if not isinstance(whole, Node) or not isinstance(fact, Fact):
        return None
    if type(dimension) is not int or type(index) is not int:
        return None
    return _Slice(cast, whole, dimension % len(fact.shape), index)


def _is_all_of_it(node: Node) -> bool:
    """Whether *node* is ``x[:]``, which ``x[:, t]`` begins with."""
    return node.target is _ATEN.slice.Tensor and node.args[2:] == (0, sys.maxsize) and not node.kwargs


def _count(node: Node) -> int:
    source = node.args[0] if is_plain_cast(node) else node
    layout: Layout | None = layout_of(source) if isinstance(source, Node) else None
    return (layout.count if layout is not None else None) or 0
