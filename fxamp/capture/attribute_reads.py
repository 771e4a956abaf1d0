"""Which attributes of modules the model's Python reads while it is recorded.

What was read is part of what a program rests on: ``dropout.p``, ``conv.stride``, ``self.config.use_cache``.
While a recording runs, ``nn.Module`` has a ``__getattribute__`` that notes the first read of each attribute
with the value of that moment.  Other threads pass it by.

Left out is what is looked at otherwise: training flags, hooks and children of the model's own modules, and
the methods of ``nn.Module`` itself.  A module that is no part of the model (one in a closure, or in a plain
list) has nobody else to look after it, so of such a one all that is read is noted.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxamp.capture.snapshots import MISSING, Snapshot, snapshot

__all__ = ["KINDS", "AttributeReads", "Origin", "Read", "locate"]

KINDS = ("", "_parameters", "_buffers", "_modules")
"""The dicts that hold the attributes of a module, in the order in which they are looked at."""

_CLASS = "class"
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)
_HOLDERS = ("_parameters", "_buffers")
_PATCHABLE = ("forward", "_compiled_call_impl")  # methods that some replace on a single module
_OWN_FRAMES = ("torch.nn.modules.module", "fxamp.")


@dataclass(frozen=True)
class Origin:
    """The module that a copy stands for.

    Attributes:
        module: The user's own.
        path: Its dotted path; ``None`` where it is in no parent's ``_modules``.
    """

    module: nn.Module
    path: str | None


@dataclass(frozen=True)
class Read:
    """One attribute as it was when it was first read.

    Attributes:
        module: Whose it is, the user's own module.
        path: Dotted path of the module; ``None`` where it is no part of the model.
        kind: Which dict holds it: ``"_parameters"``, ``"_buffers"``, ``"_modules"``, ``""`` for a plain
            attribute, ``"class"`` for one of the class or none at all.
        name: Its name.
        value: A tensor, or what :func:`~fxamp.capture.snapshots.snapshot` says of anything else.
    """

    module: nn.Module
    path: str | None
    kind: str
    name: str
    value: torch.Tensor | Snapshot


def locate(module: nn.Module, name: str, attributes: Mapping[str, Any] | None = None) -> tuple[str, Any]:
    """Where ``module.name`` comes from, and its value; of a property or method, the thing in the class."""
    attributes = module.__dict__ if attributes is None else attributes
    if name in attributes:
        return "", attributes[name]
    for kind in KINDS[1:]:
        if name in attributes.get(kind, ()):
            return kind, attributes[kind][name]
    return _CLASS, getattr(type(module), name, MISSING)


_Note = tuple[str, torch.Tensor | Snapshot]


class AttributeReads:
    """Notes what is read.

    Args:
        origins: By ``id`` of a copy, the module that it stands for.
    """

    def __init__(self, origins: Mapping[int, Origin]) -> None:
        self._origins = origins
        self._notes: dict[int, dict[str, _Note | None]] = {}
        self._strangers: dict[int, weakref.ref[nn.Module]] = {}
        self._given: set[tuple[int, str, str]] = set()

    @contextmanager
    def noted(self) -> Iterator[None]:
        """What this thread reads inside is noted."""
        here, note, ident = threading.get_ident(), self._note, threading.get_ident
        earlier = vars(nn.Module).get("__getattribute__")
        read: Callable[[Any, str], Any] = earlier or object.__getattribute__

        def get(module: Any, name: str) -> Any:
            if ident() == here and (name[:2] != "__" or name == "__dict__"):
                note(module, name)
            return read(module, name)

        with _reading_by(get):
            yield

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """What runs inside is not noted."""
        with _reading_by(None):
            yield

    def all(self) -> tuple[Read, ...]:
        """What was read of modules that are still there; not of those that ``forward`` made and dropped."""
        found = []
        for identity, notes in list(self._notes.items()):
            origin = self._origin(identity)
            if origin is not None:
                found += [
                    Read(origin.module, origin.path, note[0], name, note[1])
                    for name, note in notes.items()
                    if note is not None
                ]
        return tuple(found)

    def new(self) -> tuple[Read, ...]:
        """What was read since this was asked before."""
        found = [read for read in self.all() if (id(read.module), read.kind, read.name) not in self._given]
        self._given |= {(id(read.module), read.kind, read.name) for read in found}
        return tuple(found)

    def _origin(self, identity: int) -> Origin | None:
        if identity in self._origins:
            return self._origins[identity]
        stranger = self._strangers[identity]()
        return None if stranger is None else Origin(stranger, None)

    def _note(self, module: nn.Module, name: str) -> None:
        notes = self._notes.get(id(module))
        if notes is None:
            notes = self._meet(module)
        if name in notes:
            return
        attributes: dict[str, Any] = object.__getattribute__(module, "__dict__")
        if name == "__dict__":
            if not str(sys._getframe(2).f_globals.get("__name__")).startswith(_OWN_FRAMES):
                notes[name] = None
                for other in attributes:
                    self._note(module, other)
            return
        notes[name] = None
        if name in _HOLDERS and name in attributes:
            for other in attributes[name]:
                self._note(module, other)
        origin = self._origins.get(id(module))
        if origin is None or origin.path is None or not _is_watched_otherwise(module, name, attributes):
            notes[name] = self._look(module, name, attributes, origin)

    def _meet(self, module: nn.Module) -> dict[str, _Note | None]:
        identity = id(module)
        if identity not in self._origins:
            self._strangers[identity] = weakref.ref(module, lambda _: self._forget(identity))
        return self._notes.setdefault(identity, {})

    def _forget(self, identity: int) -> None:
        self._notes.pop(identity, None)
        self._strangers.pop(identity, None)

    def _look(
        self, module: nn.Module, name: str, attributes: Mapping[str, Any], origin: Origin | None
    ) -> _Note | None:
        owner = module if origin is None else origin.module
        if module is not owner and name == "forward":  # the copy's own tells the recorder where it is
            attributes = owner.__dict__
        kind, value = locate(module, name, attributes)
        own = locate(owner, name)[1]
        if isinstance(value, torch.Tensor):
            return (kind, value) if own is value else None  # else forward itself put it there
        seen = snapshot(value, self._original)
        put = module is not owner and (isinstance(own, torch.Tensor) or snapshot(own, self._original) != seen)
        return None if put and name != "forward" else (kind, seen)

    def _original(self, module: nn.Module) -> nn.Module:
        origin = self._origins.get(id(module))
        return module if origin is None else origin.module


def _is_watched_otherwise(module: nn.Module, name: str, attributes: Mapping[str, Any]) -> bool:
    if name in attributes:
        return name in _OF_EVERY_MODULE
    if name in attributes["_modules"]:
        return True
    own = vars(nn.Module).get(name)
    return own is not None and name not in _PATCHABLE and getattr(type(module), name, None) is own


@contextmanager
def _reading_by(get: Callable[[Any, str], Any] | None) -> Iterator[None]:
    """Attributes of modules are read by *get*, or the usual way."""
    cls: Any = nn.Module
    earlier = vars(cls).get("__getattribute__")
    _set(cls, get)
    try:
        yield
    finally:
        _set(cls, earlier)


def _set(cls: Any, get: Callable[[Any, str], Any] | None) -> None:
    if get is not None:
        cls.__getattribute__ = get
    elif "__getattribute__" in vars(cls):
        del cls.__getattribute__
