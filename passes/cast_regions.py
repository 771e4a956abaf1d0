"""The places where a cast could stand: values joined by operators that only move elements.

For one pair of dtypes, *high* (what is cast) and *low* (what it is cast to; it may well be the wider one), a
:class:`Value` is what a node stands for whatever its dtype: a cast and its argument are one value.  Its
parents are the values that it is moved from.  A region is a set of values joined like that; what comes into
it is a root, what leaves it, in either dtype, a demand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch.fx import Graph, Node

from fxamp.ir.facts import Fact, Facts
from fxamp.ir.layouts import layout_of
from fxamp.ir.memory import Memory
from fxamp.ir.operators import is_impure, is_plain_cast
from fxamp.passes.movements import fill_of, moved_inputs

__all__ = ["Region", "Rules", "Value", "find_regions", "is_beside_movement"]


@dataclass(eq=False)
class Value:
    """What one or several nodes stand for, in two dtypes.

    Attributes:
        node: The first of them.
        parents: What it is moved from; empty for a root.
        high: The node that is the value in the high dtype, if there is one.
        casts: The casts of it in the graph.
        moved_low: The node that moves it in low, if there is one.
        check: Finds out whether it is castable.
        free: Whether a cast of it folds with the cast that made it.
        high_demand: Whether anything outside needs it in high.
        low_demands: The nodes, among *casts* and *moved_low*, that something outside needs.
    """

    node: Node
    parents: tuple[Value, ...] = ()
    high: Node | None = None
    casts: list[Node] = field(default_factory=list)
    moved_low: Node | None = None
    check: Callable[[], bool] = bool
    free: bool = False
    high_demand: bool = False
    low_demands: set[Node] = field(default_factory=set)

    @cached_property
    def castable(self) -> bool:
        """Whether a cast of it has the same strides as the value itself, and may stand anywhere."""
        return self.check()

    @property
    def is_root(self) -> bool:
        """Whether it comes from outside of the region."""
        return not self.parents

    def __repr__(self) -> str:
        return f"Value(%{self.node.name})"


@dataclass(frozen=True)
class Region:
    """Values joined by movement, parents first.

    Attributes:
        high: The dtype that casts in it are from.
        low: The dtype that they are to.
        values: All of them.
    """

    high: torch.dtype
    low: torch.dtype
    values: tuple[Value, ...]

    def needed_high(self) -> set[Value]:
        """The values that must be there in high whatever is decided."""
        needed: set[Value] = set()
        for value in reversed(self.values):
            if value.high_demand or value in needed:
                needed |= {value, *value.parents}
        return needed

    def needed_low(self) -> set[Value]:
        """The values that may have to be there in low."""
        needed: set[Value] = set()
        for value in reversed(self.values):
            if value.low_demands or value in needed:
                needed |= {value, *value.parents}
        return needed


@dataclass(frozen=True)
class Rules:
    """What may be moved.

    Attributes:
        high: What is cast.
        low: What it is cast to.
        memory: Who writes to what.
        may_touch: Whether the level lets casts of a node be moved.
        may_fill: Whether a number is the same in two dtypes.
    """

    high: torch.dtype
    low: torch.dtype
    memory: Memory
    may_touch: Callable[[Node], bool]
    may_fill: Callable[[float, torch.dtype, torch.dtype], bool]


def find_regions(graph: Graph, rules: Rules) -> list[Region]:
    """The regions of *graph*, whose nodes have facts, in which a cast could move by *rules*."""
    finder = _Finder(rules, _live(graph))
    for node in graph.nodes:
        finder.enter(node)
    for node in graph.nodes:
        finder.demand(node)
    return finder.regions()


def _live(graph: Graph) -> set[Node]:
    live: set[Node] = set()
    for node in reversed(graph.nodes):
        if is_impure(node) or not live.isdisjoint(node.users):
            live.add(node)
    return live


@dataclass
class _Finder:
    rules: Rules
    live: set[Node]
    values: dict[Node, Value] = field(default_factory=dict)
    inside: set[Node] = field(default_factory=set)

    def enter(self, node: Node) -> None:
        """Make *node* one of a value that is there already, a new value, or a root."""
        dtype = _dtype_of(node.meta.get("fact"))
        if dtype not in (self.rules.high, self.rules.low) or node not in self.live:
            return
        if self._is_movable_cast(node):
            value = self.values[node.args[0]]  # type: ignore[index]
            value.casts.append(node)
            self._put(node, value)
            return
        moved = self._moved(node, dtype)
        parents = tuple(self.values[source] for source in moved)
        value = Value(node, parents, check=partial(self._is_castable, node))
        if dtype is self.rules.high:
            value.high = node
        else:
            value.moved_low = node
        self.values[node] = value
        if parents:
            self.inside.add(node)
        elif is_plain_cast(node) and node.args[0].meta["fact"].dtype is self.rules.low:  # type: ignore[union-attr]
            value.free = self.rules.high.itemsize > self.rules.low.itemsize and self.rules.memory.is_private(
                node
            )

    def _put(self, node: Node, value: Value) -> None:
        self.values[node] = value
        self.inside.add(node)

    def _moved(self, node: Node, dtype: torch.dtype) -> list[Node]:
        """What *node* moves, if it may be done in the other dtype as well; else nothing."""
        moved = moved_inputs(node)
        if not moved or not all(source in self.values for source in moved):
            return []
        same = all(_dtype_of(source.meta["fact"]) is dtype for source in moved)
        if not same or not all(self._is_still(each) for each in (node, *moved)):
            return []
        if dtype is self.rules.low and not self.rules.memory.is_private(node):
            return []
        return moved if self.rules.may_fill(fill_of(node), self.rules.high, self.rules.low) else []

    def _is_movable_cast(self, node: Node) -> bool:
        source = node.args[0] if node.args else None
        return (
            is_plain_cast(node)
            and source in self.values
            and _dtype_of(source.meta["fact"]) is self.rules.high  # type: ignore[union-attr]
            and _dtype_of(node.meta["fact"]) is self.rules.low
            and not node.meta.get("kept")
            and is_beside_movement(node)
            and self.values[source].castable  # type: ignore[index]
            and self.rules.memory.is_private(node)
            and self.rules.may_touch(node)
        )

    def _is_castable(self, node: Node) -> bool:
        layout = layout_of(node)
        return (
            layout is not None and layout.dense and layout.is_aligned(self.rules.low) and self._is_still(node)
        )

    def _is_still(self, node: Node) -> bool:
        return not self.rules.memory.is_written(node) and self.rules.may_touch(node)

    def demand(self, node: Node) -> None:
        """Note what *node* needs of the values, unless it is the movement or cast of one."""
        moved = (moved_inputs(node) or node.all_input_nodes) if node in self.inside else ()
        if node not in self.live:
            return
        for used in node.all_input_nodes:
            value = self.values.get(used)
            if value is None or used in moved:
                continue
            if _dtype_of(used.meta["fact"]) is self.rules.high:
                value.high_demand = True
            else:
                value.low_demands.add(used)

    def regions(self) -> list[Region]:
        """Those that have a cast and a movement."""
        above: dict[Value, Value] = {}

        def top(value: Value) -> Value:
            while value in above:
                value = above[value]
            return value

        values = list(dict.fromkeys(self.values.values()))
        for value in values:
            for parent in value.parents:
                one, other = top(value), top(parent)
                if one is not other:
                    above[one] = other
        groups: dict[Value, list[Value]] = {}
        for value in values:
            groups.setdefault(top(value), []).append(value)
        return [
            Region(self.rules.high, self.rules.low, tuple(group))
            for group in groups.values()
            if len(group) > 1 and any(value.casts for value in group)
        ]


def is_beside_movement(cast: Node) -> bool:
    """Whether there is anywhere that *cast* could move to."""
    source = cast.args[0]
    assert isinstance(source, Node)
    return any(map(moved_inputs, (source, *source.users, *cast.users)))


def _dtype_of(facts: Facts) -> torch.dtype | None:
    """The dtype of a tensor, or of several that have the same."""
    if isinstance(facts, Fact):
        return facts.dtype
    if isinstance(facts, tuple) and facts:
        dtypes = {_dtype_of(fact) for fact in facts}
        return dtypes.pop() if len(dtypes) == 1 else None
    return None
