"""Results of an artifact, in classes that every process knows.

=================================================  ====================================================
the model returns                                  the artifact returns
=================================================  ====================================================
a class that is registered with ``torch.export``   the same; its module is imported before the artifact
a named tuple                                      a tuple
any other object, a cache of keys and values say   a dict of those of its attributes that hold tensors
=================================================  ====================================================
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxamp.capture.structure import Spec

__all__ = ["portable", "replaced_classes"]


def portable(value: Any) -> Any:
    """*value* with the objects in it that an artifact cannot name taken apart."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return tuple(map(portable, value))
    if type(value) in (list, tuple):
        return type(value)(map(portable, value))
    if pytree.is_namedtuple(value) or _is_leaf(value):
        return value
    if type(value) in pytree.SUPPORTED_NODES:
        return _registered(value)
    return {name: portable(item) for name, item in _attributes(value) if _holds_tensors(item)}


def _registered(value: Any) -> Any:
    node = pytree.SUPPORTED_NODES[type(value)]
    children, context = node.flatten_fn(value)
    return node.unflatten_fn(list(map(portable, children)), context)


def _is_leaf(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    known = type(value) in pytree.SUPPORTED_NODES or dataclasses.is_dataclass(value)
    return not known and not hasattr(value, "__dict__")


def _attributes(value: Any) -> list[tuple[str, Any]]:
    names = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    names = list(dict.fromkeys([*names, *getattr(value, "__dict__", ())]))
    return [(name, getattr(value, name)) for name in names if hasattr(value, name)]


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(portable(value)))


def replaced_classes(spec: Spec) -> tuple[str, ...]:
    """A line for each class in a result of structure *spec* that :func:`portable` replaces."""
    return tuple(dict.fromkeys(_notes(spec)))


def _notes(spec: Any) -> Iterator[str]:
    if not isinstance(spec, tuple) or not spec:
        return
    if spec[0] in ("namedtuple", "state", "dataclass"):
        kind = "a tuple" if spec[0] == "namedtuple" else "a dict of its attributes that hold tensors"
        yield f"results: {kind} in the place of {spec[1].__module__}.{spec[1].__qualname__}"
    for part in spec:
        yield from _notes(part)
