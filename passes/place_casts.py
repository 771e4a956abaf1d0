"""Move casts through operators that only move elements, to where they cost least.

Before: eager autocast casts what each operator gets: every slice of a sequence, both halves of a split.
After:  between a value and its casts, joined by views, slices, gathers and concatenations, the casts stand
        where the bytes moved and the kernels started are fewest: hoisted to the whole that the slices are
        of, or sunk to the one row that is read.

Exact for inference: elements are moved, never computed with, so the bits are the same before and behind.
Gradients would be added up in another dtype, so in training only values that no gradient reaches are moved.
Condition: nobody writes to any of the memory concerned, no output has a moved cast or a view of one, numbers
that fill gaps are the same in both dtypes, and a cast stands only where its strides are those of the value
(``fxamp/ir/layouts.py``), so whatever reads the result finds it laid out as before.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch.fx import Graph, Node

from fxamp.ir.facts import Fact, Facts
from fxamp.ir.memory import Memory
from fxamp.ir.operators import TO_DTYPE, is_plain_cast
from fxamp.passes.cast_regions import Region, Rules, Value, find_regions, is_beside_movement
from fxamp.passes.classify import Decision
from fxamp.passes.clean_up import CleanUp, takes_part_in_gradient
from fxamp.passes.movements import is_exact_in, moved_inputs
from fxamp.passes.placements import Placement, Prices, cheapest, price_of_present

__all__ = ["PlaceCasts"]

_MOST_ROUNDS = 8  # each makes a region cheaper; two do for nearly all graphs
_OF_THE_CALL = ("val", "number", "decision", "carried_out")


@dataclass(frozen=True)
class PlaceCasts(CleanUp):
    """No other exact placement of the casts around movement is cheaper.

    Attributes:
        prices: What casts and movements cost; the sizes are those of the example that was captured.
    """

    name: ClassVar[str] = "place-casts"
    condition: ClassVar[str] = "only movement in between, the same strides, and nobody writes"
    prices: Prices = field(default_factory=Prices)

    def run(self, graph: Graph) -> bool:
        rounds = 0
        while rounds < _MOST_ROUNDS and self._improve(graph):
            rounds += 1
        return rounds > 0

    def _improve(self, graph: Graph) -> bool:
        """Place the casts of each pair of dtypes; what that gives room to may be cheaper elsewhere now."""
        casts = [node for node in graph.nodes if is_plain_cast(node) and is_beside_movement(node)]
        pairs = dict.fromkeys((cast.args[0].meta["fact"].dtype, cast.meta["fact"].dtype) for cast in casts)
        changed = False
        for high, low in pairs:
            for region in self.regions(graph, high, low):
                placement = cheapest(region, self.prices)
                if placement.price < price_of_present(region, self.prices):
                    _Writer(self, graph, region, placement).write()
                    changed = True
        return changed

    def regions(self, graph: Graph, high: torch.dtype, low: torch.dtype) -> list[Region]:
        """Where casts from *high* to *low* could move."""
        rules = Rules(high, low, self.memory(graph), self.may_move, self.may_fill)
        return find_regions(graph, rules)

    def memory(self, graph: Graph) -> Memory:
        """Which values share memory that is written to."""
        return Memory(graph)

    def may_fill(self, number: float, high: torch.dtype, low: torch.dtype) -> bool:
        """Whether *number* fills gaps with the same value in both dtypes."""
        return is_exact_in(number, high) and is_exact_in(number, low)

    def may_move(self, node: Node) -> bool:
        """Whether casts of *node* may be elsewhere, where gradients may be recorded or not."""
        return not takes_part_in_gradient(node.meta.get("fact"))


@dataclass
class _Writer:
    step: PlaceCasts
    graph: Graph
    region: Region
    placement: Placement
    lows: dict[Value, Node] = field(default_factory=dict)
    order: dict[Value, int] = field(init=False)
    decision: Decision | None = field(init=False)

    def __post_init__(self) -> None:
        self.order = {value: index for index, value in enumerate(self.region.values)}
        decisions = map(_decision, (cast for value in self.region.values for cast in value.casts))
        self.decision = next((decision for decision in decisions if decision is not None), None)

    def write(self) -> None:
        """Put the placement in the place of what is there."""
        members = {node for value in self.region.values for node in self._members(value)}
        demands = {node: value for value in self.region.values for node in value.low_demands}
        inside = members.union(demands)
        for node in [node for node in self.graph.nodes if node in inside]:
            if node in demands and not (demands[node].is_root and node is demands[node].node):
                with self.graph.inserting_before(node):
                    low = self._low(demands[node], node)
                node.replace_all_uses_with(low)
        for node in reversed([node for node in self.graph.nodes if node in inside]):
            if not node.users and node in members:
                if is_plain_cast(node):
                    self.step.note(self.graph, node, self._told())
                self.graph.erase_node(node)

    def _told(self) -> str:
        places = ", ".join(sorted(f"%{value.node.name}" for value in self.placement.cast))
        return f"moved to {places or 'where it folds'}"

    def _members(self, value: Value) -> list[Node]:
        moved = [node for node in (value.high, value.moved_low) if node is not None and not value.is_root]
        return [*moved, *value.casts]

    def _low(self, value: Value, at: Node) -> Node:
        """The value in low, for a use at the node *at*; what it is made of is written first."""
        lows, highs = self._missing(value)
        for each in sorted(lows | highs, key=self.order.__getitem__):
            if each in highs:
                each.high = self._clone(each, [self._there(parent.high) for parent in each.parents])
            if each in lows:
                self.lows[each] = self._made_low(each, at)
        return self.lows[value]

    def _made_low(self, value: Value, at: Node) -> Node:
        if value not in self.placement.moved:
            return self._cast(self._there(value.high), value, at)
        return value.node if value.is_root else self._clone(value, [self.lows[p] for p in value.parents])

    def _missing(self, value: Value) -> tuple[set[Value], set[Value]]:
        """The values that are still to be written in low, and those in high, for *value* in low."""
        lows: set[Value] = set()
        highs: set[Value] = set()
        left = [(value, True)]
        while left:
            each, low = left.pop()
            if (low and (each in self.lows or each in lows)) or (not low and (each.high or each in highs)):
                continue
            (lows if low else highs).add(each)
            if low and each not in self.placement.moved:
                left.append((each, False))
            else:
                left += [(parent, low) for parent in each.parents]
        return lows, highs

    def _there(self, node: Node | None) -> Node:
        assert node is not None, "a value that is cast is there in high"
        return node

    def _clone(self, value: Value, sources: list[Node]) -> Node:
        """The movement of *value*, of *sources* in the place of its own."""
        node, given = value.node, moved_inputs(value.node) or []
        to = dict(zip(given, sources, strict=True))
        clone = self.graph.node_copy(node, lambda argument: to.get(argument, argument))
        dtype = _any_dtype(sources[0].meta["fact"])
        clone.meta = {key: kept for key, kept in node.meta.items() if key not in _OF_THE_CALL}
        clone.meta["fact"] = _in_dtype(node.meta["fact"], dtype)
        return clone

    def _cast(self, source: Node, value: Value, at: Node) -> Node:
        cast = self.graph.call_function(TO_DTYPE, (source, self.region.low))
        fact = source.meta["fact"]
        cast.meta.update(
            region=at.meta["region"],
            grad=at.meta["grad"],
            where=at.meta.get("where"),
            fact=replace(fact.cast_to(self.region.low, grad=False)),
        )
        decision = next((d for d in map(_decision, value.casts) if d is not None), self.decision)
        if decision is not None:
            cast.meta["inserted"] = decision
        cast._rename(f"{value.node.name}_{self.region.low.abbr}")
        return cast


def _decision(cast: Node) -> Decision | None:
    """What *cast* carries out; ``None`` for one that the model makes itself."""
    return cast.meta.get("inserted")


def _any_dtype(facts: Facts) -> torch.dtype:
    while isinstance(facts, tuple):
        facts = facts[0]
    assert isinstance(facts, Fact)
    return facts.dtype


def _in_dtype(facts: Facts, dtype: torch.dtype) -> Facts:
    if isinstance(facts, tuple):
        return tuple(_in_dtype(fact, dtype) for fact in facts)
    assert facts is not None
    return replace(facts, dtype=dtype, leaf=False)
