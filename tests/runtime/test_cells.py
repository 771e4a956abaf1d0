"""Cells are the same until any place holds another object, or something comes or goes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest

from fxamp.runtime.cells import Cells


class Thing:
    """Has attributes."""

    def __init__(self) -> None:
        self.name = "one"


class Other(Thing):
    """Another class of the same layout."""


class Places:
    """One of each kind of place."""

    def __init__(self) -> None:
        self.list, self.dict, self.set = [1.5, 2.5], {"a": 3.5}, {"x"}
        self.thing = Thing()
        self.ordered: OrderedDict[str, object] = OrderedDict(a=object(), b=object())
        self.empty: dict[str, object] = {}

    def cells(self) -> Cells:
        """All of it."""
        cells = Cells()
        cells.add_item(self.list, 0, self.list[0])
        cells.add_item(self.dict, "a", self.dict["a"])
        cells.add_size(self.list)
        cells.add_attribute(self.thing, "name", self.thing.name)
        cells.add_absence(self.dict, "b")
        cells.add_keys(self.set)
        cells.add_values(self.ordered)
        cells.add_values(self.empty)
        cells.add_classes([self.thing])
        return cells.close()


def _set(name: str, value: Any) -> Callable[[Places], None]:
    return lambda places: setattr(places.thing, name, value)


_CHANGES: dict[str, Callable[[Places], Any]] = {
    "another item": lambda p: p.list.__setitem__(0, float("9.5")),
    "an item that is equal, and another object": lambda p: p.list.__setitem__(0, float("1.5")),
    "one item more": lambda p: p.list.append(1.0),
    "the item is gone": lambda p: p.list.clear(),
    "another value": lambda p: p.dict.__setitem__("a", 4.5),
    "the key is gone": lambda p: p.dict.clear(),
    "a key that was not there": lambda p: p.dict.__setitem__("b", 1.0),
    "another member of a set": lambda p: p.set.symmetric_difference_update({"x", "y"}),
    "another attribute": _set("name", "two"),
    "the attribute is gone": lambda p: delattr(p.thing, "name"),
    "another class": _set("__class__", Other),
    "another order": lambda p: p.ordered.move_to_end("a"),
    "another value in order": lambda p: p.ordered.__setitem__("a", object()),
    "one value more": lambda p: p.ordered.__setitem__("c", object()),
    "one value less": lambda p: p.ordered.popitem(),
    "what was empty is not": lambda p: p.empty.__setitem__("a", object()),
}


def test_what_nobody_touches_is_the_same() -> None:
    places = Places()
    cells = places.cells()
    places.dict["c"] = 1.0  # no place of it
    places.list[1] = 7.5
    assert cells.are_same()
    assert Cells().close().are_same()


@pytest.mark.parametrize("change", _CHANGES.values(), ids=_CHANGES)
def test_a_change_is_seen(change: Callable[[Places], Any]) -> None:
    places = Places()
    cells = places.cells()
    change(places)
    assert not cells.are_same()


def test_what_is_put_back_is_the_same() -> None:
    places = Places()
    cells = places.cells()
    was, places.thing.name = places.thing.name, "two"
    assert not cells.are_same()
    places.thing.name = was
    assert cells.are_same()
