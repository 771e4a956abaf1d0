"""Where in a region the casts stand: what that costs, and the cheapest way.

It is a minimum cut.  Each value has two nodes in the network: above the first it is high, below the second
it is low, and the edge between them is a cast of it.  A value is moved in low if all its parents are there
in low, else in high, at the price of each; the cheapest cut between the high roots and the low demands is
the cheapest placement of all that are exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import networkx as nx
import sympy
import torch
from torch._ops import OpOverload
from torch.fx import Node

from fxamp.ir.layouts import layout_of
from fxamp.passes.cast_regions import Region, Value
from fxamp.passes.movements import moved_inputs

__all__ = ["Placement", "Prices", "cheapest", "price_of", "price_of_present"]

_UNKNOWN_COUNT = 4096  # elements of a tensor whose size depends on data


@dataclass(frozen=True)
class Placement:
    """A decision for one region.

    Attributes:
        cast: The values that are cast.
        moved: The values that are moved in low, the low roots among them.
        price: What it costs.
    """

    cast: frozenset[Value]
    moved: frozenset[Value]
    price: int


@dataclass(frozen=True)
class Prices:
    """What a step costs, in bytes moved; a kernel that is started counts as so many.

    Attributes:
        launch: How many bytes are moved in the time that it takes to start a kernel.
        line: Likewise for a line of flat code that starts no kernel (a view).
        cast: What a cast costs on top, whatever its size.
        symbolic: Whether prices are SymPy expressions in the sizes; else they are those of the example.
    """

    launch: int = 2**15
    line: int = 1
    cast: int = 0
    symbolic: bool = False

    def of_cast(self, value: Value, high: torch.dtype, low: torch.dtype) -> Any:
        """A cast of *value*."""
        if value.free:
            return 0
        return self.cast + self.launch + self._count(value) * (high.itemsize + low.itemsize)

    def of_move(self, value: Value, dtype: torch.dtype) -> Any:
        """The movement that gives *value*, in *dtype*."""
        if value.is_root:
            return 0
        if _is_view(value.node):
            return self.line
        return self.launch + self._count(value) * 2 * dtype.itemsize

    def _count(self, value: Value) -> Any:
        layout = layout_of(value.node)
        if layout is None:
            return _UNKNOWN_COUNT
        if self.symbolic:
            return prod(layout.shape, start=sympy.Integer(1))
        return _UNKNOWN_COUNT if layout.count is None else layout.count


def _is_view(node: Node) -> bool:
    if "moves_nothing" not in node.meta:
        moved, given = node.meta.get("val"), moved_inputs(node) or []
        sources = [source.meta.get("val") for source in given]
        memories = {s.untyped_storage()._cdata for s in sources if isinstance(s, torch.Tensor)}
        tensors = moved if isinstance(moved, (list, tuple)) else [moved]
        shares = [isinstance(t, torch.Tensor) and t.untyped_storage()._cdata in memories for t in tensors]
        node.meta["moves_nothing"] = not isinstance(node.target, OpOverload) or all(shares)
    return bool(node.meta["moves_nothing"])


def price_of_present(region: Region, prices: Prices) -> Any:
    """What the placement costs that is in the graph."""
    total = 0
    for value in region.values:
        total += len(value.casts) * prices.of_cast(value, region.high, region.low)
        if value.high is not None:
            total += prices.of_move(value, region.high)
        if value.moved_low is not None:
            total += prices.of_move(value, region.low)
    return total


def price_of(region: Region, placement: Placement, prices: Prices) -> Any:
    """What *placement* costs."""
    high = region.needed_high()
    total = sum(prices.of_move(value, region.high) for value in high)
    for value in region.needed_low():
        if value in placement.moved:
            total += prices.of_move(value, region.low)
        elif value not in high:
            total += prices.of_move(value, region.high)
        if value in placement.cast:
            total += prices.of_cast(value, region.high, region.low)
    return total


def cheapest(region: Region, prices: Prices) -> Placement:
    """The placement that costs least of those that have no more casts than the region has now.

    Where the one that costs least of all has more, casts are made dearer until it has not.  The price that is
    told is by *prices*.
    """
    most = sum(len(value.casts) for value in region.values if not value.free)
    found, dearer = _cheapest(region, prices), prices
    while sum(not value.free for value in found.cast) > most:
        dearer = replace(dearer, cast=2 * dearer.cast or prices.launch or 1)
        found = _cheapest(region, dearer)
    return found if dearer is prices else replace(found, price=int(price_of(region, found, prices)))


def _cheapest(region: Region, prices: Prices) -> Placement:
    """The placement that costs least, by a minimum cut."""
    network, fixed = _network(region, prices)
    cut, (above, _) = nx.minimum_cut(network, "high", "low", capacity="capacity")
    low = [value for value in region.values if (value, "out") in network]
    return Placement(
        cast=frozenset(v for v in low if (v, "in") in above and (v, "out") not in above),
        moved=frozenset(v for v in low if (v, "in") not in above),
        price=fixed + int(cut),
    )


def _network(region: Region, prices: Prices) -> tuple[Any, int]:
    high, low = region.needed_high(), region.needed_low()
    fixed = sum(prices.of_move(value, region.high) for value in high)
    network = nx.DiGraph()
    network.add_nodes_from(("high", "low"))
    for value in region.values:
        if value not in low:
            continue
        entry, leave = (value, "in"), (value, "out")
        if value.castable:
            network.add_edge(entry, leave, capacity=prices.of_cast(value, region.high, region.low))
        else:
            network.add_edge(entry, leave)  # without a capacity it is never cut
        network.add_edge(leave, entry)
        if value.low_demands:
            network.add_edge(leave, "low")
        if value.is_root:
            network.add_edge(*(("high", entry) if value.high is not None else (entry, "low")))
            continue
        network.add_edge("high", entry, capacity=prices.of_move(value, region.low))
        if value not in high:
            network.add_edge(entry, "low", capacity=prices.of_move(value, region.high))
        for parent in value.parents:
            network.add_edge((parent, "out"), entry)
            if value not in high:
                network.add_edge(entry, (parent, "in"))
    return network, fixed
