"""Whether the attributes that a program rests on are as they were when it was captured.

The truth is a snapshot of each attribute.  It is too slow to take on every call, so where all snapshots agree
the objects found are kept in flat lists, and while each place still holds the very same object nothing can
have changed.  Only where one does not are the snapshots compared again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn

from fxamp.capture.attribute_reads import KINDS, Read, locate
from fxamp.capture.snapshots import (
    ATOMS,
    MISSING,
    Same,
    Snapshot,
    attributes_of,
    is_container,
    is_stateful,
    snapshot,
)
from fxamp.runtime.cells import Cells
from fxamp.runtime.watch import Slot, TensorWatch

__all__ = ["AttributeWatch"]

_LONGEST = 60
_OBJECT = 3  # the length of the snapshot of an object with attributes


class AttributeWatch:
    """The attributes that a program rests on.

    Args:
        reads: What Python read while the program was captured.
        slots: The places of tensors that a :class:`~fxamp.runtime.watch.TensorWatch` looks after.
    """

    def __init__(self, reads: Sequence[Read], slots: Sequence[Slot]) -> None:
        watched = {(id(holder), name) for holder, name in slots}
        self._reads: list[_Expected] = []
        unused: list[Slot] = []
        for read in reads:
            if not isinstance(read.value, torch.Tensor):
                self._reads.append(_Expected(read, read.value))
            elif read.path is None or read.kind == "class":  # the program has this very tensor as a constant
                self._reads.append(_Expected(read, (type(read.value), Same(read.value))))
            else:
                attributes = read.module.__dict__
                holder = attributes[read.kind] if read.kind else attributes
                if (id(holder), read.name) not in watched:
                    unused.append((holder, read.name))
        self._tensors = TensorWatch(unused, nn.Module()) if unused else None
        self._cells: Cells | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to look at."""
        return not self._reads and self._tensors is None

    def hold(self) -> bool:
        """Whether nothing has changed."""
        cells = self._cells
        if (cells is None or not cells.are_same()) and not self._agree():
            return False
        return self._tensors is None or self._tensors.read() is not None

    def difference(self) -> str:
        """What has changed, for people; ``""`` if nothing has."""
        for read in self._reads:
            now = read.now()
            if now != read.value:
                name, one, other = _inside(read.place, now, read.value)
                return f"the attribute {name} is {one}, not {other}"
        if self._tensors is not None:
            return self._tensors.difference()
        return ""

    def _agree(self) -> bool:
        """Compare the snapshots; afterwards identity is enough for a while."""
        for index, read in enumerate(self._reads):
            if read.now() != read.value:
                if index:  # look here first the next time
                    self._reads = [read, *self._reads[:index], *self._reads[index + 1 :]]
                return False
        self._cells = Cells()
        self.gather(self._cells)
        self._cells.close()
        return True

    def gather(self, cells: Cells) -> None:
        """Add the attributes, which hold, to *cells*; while those are the same, so do these."""
        gathering = _Gathering(cells)
        for read in self._reads:
            gathering.add(read.module, read.name)

    @property
    def has_rest(self) -> bool:
        """Whether there is something that is in no cells."""
        return self._tensors is not None


class _Expected:
    """An attribute and its snapshot."""

    def __init__(self, read: Read, value: Snapshot) -> None:
        self.module, self.path, self.name, self.value = read.module, read.path, read.name, value

    def now(self) -> Snapshot:
        return snapshot(locate(self.module, self.name)[1])

    @property
    def place(self) -> str:
        if self.path is None:
            return f"{self.name!r} of a {type(self.module).__name__} outside of the model"
        return repr(f"{self.path}.{self.name}" if self.path else self.name)


class _Gathering:
    """Puts attributes, and what can change in them while they stay the same objects, into cells."""

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self._met: dict[int, Any] = {}

    def add(self, module: nn.Module, name: str) -> None:
        """Add an attribute of a module, wherever Python finds it."""
        kind, value = locate(module, name)
        attributes = module.__dict__
        if kind != "class":
            holder = attributes[kind] if kind else attributes
            self._cells.add_item(holder, name, value)
            self._add(value)
            return
        kinds = KINDS if value is MISSING else ("",)
        for holder in (attributes[each] if each else attributes for each in kinds):
            self._cells.add_absence(holder, name)
        if value is not vars(nn.Module).get(name, MISSING):
            self._cells.add_attribute(type(module), name, value)
            self._add(value)

    def _add(self, value: Any, *, objects: bool = True) -> None:
        """What can change in *value* while it stays the same object."""
        kind = type(value)
        if kind in ATOMS or kind is float or (id(value) in self._met and objects):
            return
        if objects:
            self._met[id(value)] = value
        if kind is MethodType:
            self._add(value.__self__, objects=False)
        elif kind is functools.partial:
            for part in (value.func, value.args, value.keywords):
                self._add(part, objects=objects)
        elif is_container(value):
            self._add_container(value, objects=objects)
        elif objects and is_stateful(value):
            self._add_object(value)

    def _add_container(self, value: Any, *, objects: bool) -> None:
        if isinstance(value, (dict, set)):
            self._cells.add_keys(value)
        elif not isinstance(value, (tuple, frozenset)):
            self._cells.add_size(value)
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in pairs:
            if not isinstance(value, (tuple, set, frozenset)):
                self._cells.add_item(value, key, item)
            self._add(item, objects=objects)

    def _add_object(self, value: Any) -> None:
        state = getattr(value, "__dict__", None)
        if isinstance(state, dict):
            self._cells.add_size(state)
        for name, item in attributes_of(value).items():
            if isinstance(state, dict):
                self._cells.add_item(state, name, item)
            else:
                self._cells.add_attribute(value, name, item)
            self._add(item, objects=False)


def _inside(place: str, now: Snapshot, was: Snapshot) -> tuple[str, str, str]:
    """Where two snapshots differ: of one and the same object, in which attribute."""
    if len(now) == len(was) == _OBJECT and now[:2] == was[:2] and isinstance(now[1], Same):
        before = dict(was[2])
        for name, value in now[2]:
            if name in before and value != before[name]:
                return f"{name!r} of {place}", _text(value), _text(before[name])
    return place, _text(now), _text(was)


def _text(value: Snapshot) -> str:
    """A snapshot for people."""
    kind, *content = value
    if kind in ATOMS or (content and isinstance(content[0], str)):
        text = repr(content[0]) if kind in ATOMS else content[0]
    elif content and isinstance(content[0], Same):
        text = "missing" if content[0].value is MISSING else f"this {kind.__name__}"
    else:
        text = f"this {kind.__name__}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
