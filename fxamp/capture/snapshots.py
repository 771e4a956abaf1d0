"""What a plain value is at one moment, in a form that can be compared later.

==========================  =======================================================
numbers, strings, dtypes    class and value; of a float its ``repr``, which tells 0.0
                            from -0.0 and makes nan equal to itself
lists, tuples, dicts, sets  class and contents
other objects               identity, and their plain attributes, one level deep
modules, tensors, functions identity
==========================  =======================================================

A container of more than 256 items counts as one object without attributes, so that a vocabulary kept on a
module does not make every call slow.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from enum import Enum
from operator import itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["ATOMS", "MISSING", "Same", "Snapshot", "attributes_of", "is_container", "is_stateful", "snapshot"]

Snapshot = tuple[Any, ...]
"""Nested tuples; equal where the values are."""

ATOMS = (
    bool, int, str, bytes, type(None), type(...),
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_REPRESENTED = (int, float, complex, str, bytes, np.generic, slice, range)
_MAPPINGS = (dict, OrderedDict, defaultdict)
_SEQUENCES = (list, tuple, deque)
_SETS = (set, frozenset)
_FUNCTIONS = (type, ModuleType, BuiltinFunctionType, FunctionType, MethodType, functools.partial)
_STATELESS = (*_FUNCTIONS, *_MAPPINGS, *_SEQUENCES, *_SETS, torch.Tensor, nn.Module, Enum, np.ndarray)
_LARGEST = 256
_DEEPEST = 8


class _Missing:
    """Stands for the value of an attribute that is not there."""

    def __repr__(self) -> str:
        return "nothing"


MISSING = _Missing()


class Same:
    """An object that is equal to nothing but itself."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"a {type(self.value).__name__}"


def _as_it_is(module: nn.Module) -> nn.Module:
    return module


def snapshot(
    value: Any,
    original: Callable[[nn.Module], nn.Module] = _as_it_is,
    *,
    objects: bool = True,
    depth: int = 0,
) -> Snapshot:
    """*value* as it is now.

    Args:
        value: Anything.
        original: The module that another stands for (a copy that is recorded).
        objects: Whether the attributes of an object count too.
        depth: How deep in a container *value* sits.
    """
    kind = type(value)
    if kind in ATOMS:
        return kind, value
    if isinstance(value, _REPRESENTED) and not isinstance(value, Enum):
        return kind, repr(value)
    if is_container(value) and depth < _DEEPEST:
        return _contents(value, original, objects, depth + 1)
    if kind is MethodType:
        owner = value.__self__
        return kind, Same(value.__func__), snapshot(owner, original, objects=False, depth=depth)
    if kind is functools.partial:
        parts = (value.func, value.args, value.keywords)
        return kind, *(snapshot(part, original, objects=objects, depth=depth + 1) for part in parts)
    if isinstance(value, nn.Module):
        return kind, Same(original(value))
    if objects and is_stateful(value):
        state = sorted(attributes_of(value).items(), key=itemgetter(0))
        inner = ((name, snapshot(item, original, objects=False, depth=depth + 1)) for name, item in state)
        return kind, Same(value), tuple(inner)
    return kind, Same(value)


def _contents(value: Any, original: Callable[[nn.Module], nn.Module], objects: bool, depth: int) -> Snapshot:  # noqa: FBT001
    def inner(item: Any) -> Snapshot:
        return snapshot(item, original, objects=objects, depth=depth)

    if isinstance(value, Mapping):
        return type(value), tuple((inner(key), inner(item)) for key, item in value.items())
    if isinstance(value, _SETS):
        return type(value), frozenset(map(inner, value))
    return type(value), tuple(map(inner, value))


def is_container(value: Any) -> bool:
    """Whether *value* is a container that is compared by its contents."""
    return isinstance(value, (*_MAPPINGS, *_SEQUENCES, *_SETS)) and len(value) <= _LARGEST


def is_stateful(value: Any) -> bool:
    """Whether *value* is an object whose plain attributes count."""
    return not isinstance(value, _STATELESS) and bool(attributes_of(value))


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of an object, in its ``__dict__`` or its slots; none where there are too many."""
    state = getattr(value, "__dict__", None)
    if not isinstance(state, dict):
        slots = [name for cls in type(value).__mro__ for name in _slots_of(cls)]
        state = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    if len(state) > _LARGEST:
        return {}
    return {name: item for name, item in state.items() if isinstance(name, str)}


def _slots_of(cls: type) -> list[str]:
    slots = vars(cls).get("__slots__", ())
    return [name for name in ([slots] if isinstance(slots, str) else slots) if not name.startswith("__")]
