"""Arguments and results taken apart into tensors and the structure around them.

``flatten`` walks lists, tuples, named tuples, dicts, dataclasses and whatever is registered with
``torch.utils._pytree`` (transformers' ``ModelOutput``).  What is no container and no tensor is a
constant, and part of the structure: two calls have the same structure only if they agree on it.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxamp.errors import CaptureError

__all__ = ["Spec", "flatten", "flatten_results", "unflatten"]

Spec = tuple[Any, ...]
"""The structure around the tensors: nested tuples, hashable, equal when two calls look alike."""

_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout)
_LEAF = ("leaf",)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class _Identity:
    """An object without tensors in it, which is itself and equal to nothing else."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.value is self.value


def flatten(value: object) -> tuple[Spec, list[Any]]:
    """Take *value* apart.

    Returns:
        Its structure, and its tensors (and symbolic numbers, while capturing) in order.

    Raises:
        CaptureError: An object of an unknown class holds tensors.
    """
    leaves: list[Any] = []
    return _flatten(value, leaves.append), leaves


def flatten_results(value: object) -> tuple[Spec, list[Any]]:
    """Take the result of an operator apart, in which numbers are values like tensors.

    Returns:
        The structure, and the tensors and numbers in order; ``unflatten`` puts them together again.
    """
    if isinstance(value, (torch.Tensor, bool, int, float)):
        return _LEAF, [value]
    if isinstance(value, (list, tuple)):
        parts = [flatten_results(item) for item in value]
        kind = list if isinstance(value, list) else tuple
        return (kind, tuple(spec for spec, _ in parts)), [leaf for _, found in parts for leaf in found]
    return flatten(value)


def _flatten(value: Any, found: Callable[[Any], None]) -> Spec:
    if isinstance(value, (torch.Tensor, *_SYMBOLIC)):
        found(value)
        return _LEAF
    kind = type(value)
    if kind in _ATOMS:
        # repr tells 0.0 from -0.0 and makes nan equal to itself
        return ("constant", kind, repr(value) if kind in (float, complex) else value, _Opaque(value))
    if kind in (list, tuple, torch.Size):
        return (kind, tuple(_flatten(item, found) for item in value))
    if kind in (dict, OrderedDict):
        # the class of a key tells 1 from True
        return (kind, tuple((key, type(key), _flatten(item, found)) for key, item in value.items()))
    if kind in pytree.SUPPORTED_NODES:
        return _flatten_registered(value, found)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return ("namedtuple", kind, tuple(_flatten(item, found) for item in value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _flatten_dataclass(value, found)
    if _holds_tensors(value):
        raise CaptureError(
            f"cannot take apart an object of class {kind.__module__}.{kind.__qualname__} that holds tensors\n"
            "  register it:  torch.utils._pytree.register_pytree_node(...)"
        )
    return ("object", kind, _Identity(value), _settings(value))


def _settings(value: object) -> tuple[Any, ...]:
    """The plain attributes of an object, so that a changed one makes another structure."""
    attributes = getattr(value, "__dict__", {})
    return tuple((name, repr(item)) for name, item in attributes.items() if type(item) in _ATOMS)


def _flatten_registered(value: Any, found: Callable[[Any], None]) -> Spec:
    children, context = pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)
    parts = tuple(_flatten(child, found) for child in children)
    key = _hashable(context)
    return ("registered", type(value), key, parts, _Opaque(context))


def _flatten_dataclass(value: Any, found: Callable[[Any], None]) -> Spec:
    fields = (field.name for field in dataclasses.fields(value) if hasattr(value, field.name))
    names = tuple(dict.fromkeys([*fields, *getattr(value, "__dict__", ())]))
    parts = tuple(_flatten(getattr(value, name), found) for name in names)
    return ("dataclass", type(value), names, parts)


class _Opaque:
    """Rides along in a structure without taking part in comparison."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Opaque)


def _hashable(context: object) -> object:
    if isinstance(context, (list, tuple)):
        return tuple(_hashable(item) for item in context)
    if isinstance(context, dict):
        return tuple((key, _hashable(item)) for key, item in context.items())
    try:
        hash(context)
    except TypeError:
        return _Identity(context)
    return context


def _holds_tensors(value: object, depth: int = 3) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, torch.nn.Module) or depth == 0:
        return False
    if isinstance(value, dict):
        return any(_holds_tensors(item, depth - 1) for item in value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(_holds_tensors(item, depth - 1) for item in value)
    return any(_holds_tensors(item, depth - 1) for item in getattr(value, "__dict__", {}).values())


def unflatten(spec: Spec, leaves: Sequence[object]) -> Any:
    """Put *leaves* back into the structure *spec*; the inverse of :func:`flatten`."""
    return _unflatten(spec, iter(leaves))


def _unflatten(spec: Spec, leaves: Iterator[object]) -> Any:
    kind = spec[0]
    if kind == "leaf":
        return next(leaves)
    if kind == "constant":
        return spec[3].value
    if kind == "object":
        return spec[2].value
    if kind in (list, tuple, torch.Size):
        return kind([_unflatten(part, leaves) for part in spec[1]])
    if kind in (dict, OrderedDict):
        return kind((key, _unflatten(part, leaves)) for key, _, part in spec[1])
    if kind == "namedtuple":
        return spec[1](*(_unflatten(part, leaves) for part in spec[2]))
    if kind == "registered":
        children = [_unflatten(part, leaves) for part in spec[3]]
        return pytree.SUPPORTED_NODES[spec[1]].unflatten_fn(children, spec[4].value)
    built = object.__new__(spec[1])
    for name, part in zip(spec[2], spec[3], strict=True):
        object.__setattr__(built, name, _unflatten(part, leaves))
    return built
