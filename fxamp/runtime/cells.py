"""Places, and the very objects that were found in them, as flat lists that are compared in C.

While each place still holds the same object, nothing that was concluded from them can have changed.  Where
one does not, that says nothing yet: another object may be just as good.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain, repeat
from operator import contains, getitem, is_, methodcaller
from typing import Any

__all__ = ["Cells"]

_MISSING = object()
_NOTHING = repeat(_MISSING)
_values = methodcaller("values")


class Cells:
    """What is added is as it is now; once closed, :meth:`are_same` asks whether it still is."""

    def __init__(self) -> None:
        self._items: dict[tuple[int, Any], tuple[Any, Any, Any]] = {}
        self._attributes: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        self._absences: dict[tuple[int, str], tuple[Any, str]] = {}
        self._sized: dict[int, Any] = {}
        self._ordered: dict[int, Mapping[Any, Any]] = {}
        self._listed: list[tuple[Any, tuple[Any, ...]]] = []
        self._objects: list[Any] = []

    def add_item(self, holder: Any, key: Any, value: Any) -> None:
        """``holder[key]`` is *value*."""
        self._items[id(holder), key] = (holder, key, value)

    def add_attribute(self, owner: Any, name: str, value: Any) -> None:
        """The attribute *name* of *owner* is *value*."""
        self._attributes[id(owner), name] = (owner, name, value)

    def add_absence(self, holder: Any, key: Any) -> None:
        """*key* is not in *holder*."""
        self._absences[id(holder), key] = (holder, key)

    def add_size(self, container: Any) -> None:
        """*container* has as many items as now."""
        self._sized[id(container)] = container

    def add_values(self, holder: Mapping[Any, Any]) -> None:
        """The dict *holder* has these values in this order."""
        self._sized[id(holder)] = holder
        self._ordered[id(holder)] = holder

    def add_keys(self, container: Any) -> None:
        """Iterating over the dict or set *container* gives these objects in this order."""
        self._listed.append((container, tuple(container)))

    def add_classes(self, objects: Iterable[Any]) -> None:
        """Each of *objects* is of its class."""
        self._objects += objects

    def close(self) -> Cells:
        """Nothing is added any more."""
        self._holders, self._keys, self._held = _columns(self._items.values(), 3)
        self._owners, self._names, self._values = _columns(self._attributes.values(), 3)
        self._without, self._absent = _columns(self._absences.values(), 2)
        self._containers = list(self._sized.values())
        self._sizes = list(map(len, self._containers))
        self._dicts = list(self._ordered.values())
        self._ordered_values = list(chain.from_iterable(map(_values, self._dicts)))
        self._types = list(map(type, self._objects))
        return self

    def are_same(self) -> bool:
        """Whether all of it is still so."""
        if any(map(contains, self._without, self._absent)):
            return False
        for container, items in self._listed:  # before the items: a defaultdict makes what it lacks
            if len(container) != len(items) or not all(map(is_, container, items)):
                return False
        if list(map(len, self._containers)) != self._sizes or list(map(type, self._objects)) != self._types:
            return False
        try:
            if not all(map(is_, map(getitem, self._holders, self._keys), self._held)):
                return False
        except LookupError:
            return False
        return all(map(is_, chain.from_iterable(map(_values, self._dicts)), self._ordered_values)) and all(
            map(is_, map(getattr, self._owners, self._names, _NOTHING), self._values)
        )


def _columns(rows: Iterable[tuple[Any, ...]], width: int) -> list[tuple[Any, ...]]:
    return list(zip(*rows, strict=True)) or [()] * width
