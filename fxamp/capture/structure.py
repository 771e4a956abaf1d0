"""Arguments and results taken apart into tensors and the structure around them.

``flatten`` walks lists, tuples, named tuples, dicts, dataclasses, whatever is registered with
``torch.utils._pytree`` (transformers' ``ModelOutput``), and objects that are no more than their attributes
(a cache of keys and values).  What is no container and no tensor is a constant, and part of the structure:
two calls have the same structure only if they agree on it.  A mutable object that occurs twice is one object.
"""

from __future__ import annotations

import dataclasses
from abc import ABCMeta
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from types import FunctionType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxamp.errors import CaptureError

__all__ = [
    "Spec",
    "contents",
    "flatten",
    "flatten_results",
    "mutable_objects",
    "set_contents",
    "strangers",
    "unflatten",
]

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


def flatten(value: object, known: Sequence[object] = ()) -> tuple[Spec, list[Any]]:
    """Take *value* apart.

    Args:
        value: Anything.
        known: Mutable objects that are not taken apart: the structure says which one is meant.

    Returns:
        Its structure, and its tensors (and symbolic numbers, while capturing) in order.

    Raises:
        CaptureError: An object of an unknown class holds tensors.
    """
    flattening = _Flattening(known)
    return flattening.flatten(value), flattening.leaves


def mutable_objects(value: object) -> list[object]:
    """The lists, dicts and objects in *value* in the order of its structure; each one once."""
    flattening = _Flattening()
    flattening.flatten(value)
    return flattening.objects


def strangers(value: object) -> list[object]:
    """The objects in *value* that are passed on as they are, although a call may write to them."""
    flattening = _Flattening()
    flattening.flatten(value)
    return [stranger for stranger in flattening.strangers if _has_attributes(stranger)]


def _has_attributes(value: object) -> bool:
    return not isinstance(value, (type, torch.nn.Module, FunctionType)) and hasattr(value, "__dict__")


def contents(value: Any) -> tuple[tuple[Any, Any], ...]:
    """What a mutable object holds, one level deep: keys, indices or attributes, with their values."""
    if isinstance(value, list):
        return tuple(enumerate(value))
    return tuple((value if isinstance(value, dict) else value.__dict__).items())


def set_contents(value: Any, now: Sequence[tuple[Any, Any]]) -> None:
    """Make *value* hold what :func:`contents` gave."""
    if isinstance(value, list):
        value[:] = [item for _, item in now]
        return
    held = value if isinstance(value, dict) else value.__dict__
    held.clear()
    held.update(now)


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


class _Flattening:
    """One run of :func:`flatten`."""

    def __init__(self, known: Sequence[object] = ()) -> None:
        self.leaves: list[Any] = []
        self.objects = list(known)
        self.strangers: list[Any] = []
        self._numbers = {id(value): number for number, value in enumerate(known)}

    def flatten(self, value: Any) -> Spec:
        if isinstance(value, (torch.Tensor, *_SYMBOLIC)):
            self.leaves.append(value)
            return _LEAF
        kind = type(value)
        if kind in _ATOMS:
            # repr tells 0.0 from -0.0 and makes nan equal to itself
            return ("constant", kind, repr(value) if kind in (float, complex) else value, _Opaque(value))
        if kind in (tuple, torch.Size):
            return (kind, self._all(value))
        if kind in (list, dict, OrderedDict):
            return self._once(value) or self._container(value)
        if kind in pytree.SUPPORTED_NODES:
            return self._registered(value)
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return ("namedtuple", kind, self._all(value))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._once(value) or self._dataclass(value)
        if _is_plain_object(value):
            names = tuple(value.__dict__)
            return self._once(value) or ("state", kind, names, self._all(value.__dict__.values()))
        if _holds_tensors(value):
            raise CaptureError(
                f"cannot take apart an object of class {kind.__module__}.{kind.__qualname__} "
                "that holds tensors\n"
                "  register it:  torch.utils._pytree.register_pytree_node(...)"
            )
        self.strangers.append(value)
        return ("object", kind, _Identity(value), _settings(value))

    def _once(self, value: Any) -> Spec | None:
        """Where *value* was seen before; else it is noted, and taken apart."""
        if id(value) in self._numbers:
            return ("again", self._numbers[id(value)])
        self._numbers[id(value)] = len(self.objects)
        self.objects.append(value)
        return None

    def _all(self, values: Iterable[Any]) -> tuple[Spec, ...]:
        return tuple([self.flatten(value) for value in values])

    def _container(self, value: Any) -> Spec:
        if type(value) is list:
            return (list, self._all(value))
        # the class of a key tells 1 from True
        return (type(value), tuple([(key, type(key), self.flatten(item)) for key, item in value.items()]))

    def _registered(self, value: Any) -> Spec:
        children, context = pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)
        parts = self._all(children)
        return ("registered", type(value), _hashable(context), parts, _Opaque(context))

    def _dataclass(self, value: Any) -> Spec:
        fields = (field.name for field in dataclasses.fields(value) if hasattr(value, field.name))
        names = tuple(dict.fromkeys([*fields, *getattr(value, "__dict__", ())]))
        return ("dataclass", type(value), names, self._all(getattr(value, name) for name in names))


class _Plain:
    """What an object of a class written in Python looks like to the interpreter."""


def _is_plain_object(value: Any) -> bool:
    """Whether *value* is no more than its attributes: an object of a class in Python, such as a cache."""
    kind = type(value)
    return (
        kind.__basicsize__ == _Plain.__basicsize__
        and kind.__itemsize__ == 0
        and type(kind) in (type, ABCMeta)
        and not any("__reduce__" in vars(base) or "__reduce_ex__" in vars(base) for base in kind.__mro__[:-1])
        and not callable(value)
        and not any(vars(base).get("__slots__") for base in kind.__mro__)
        and hasattr(value, "__dict__")
    )


def _settings(value: object) -> tuple[Any, ...]:
    """The plain attributes of an object, so that a changed one makes another structure."""
    attributes = getattr(value, "__dict__", {})
    return tuple((name, repr(item)) for name, item in attributes.items() if type(item) in _ATOMS)


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
    return any(_holds_tensors(item, depth - 1) for item in list(getattr(value, "__dict__", {}).values()))


def unflatten(spec: Spec, leaves: Sequence[object], known: Sequence[object] = ()) -> Any:
    """Put *leaves* back into the structure *spec*; the inverse of :func:`flatten`."""
    if spec == _LEAF:
        return leaves[0]
    return _Building(iter(leaves), list(known)).build(spec)


@dataclasses.dataclass
class _Building:
    """One run of :func:`unflatten`."""

    leaves: Iterator[object]
    objects: list[Any]

    def build(self, spec: Spec) -> Any:
        kind = spec[0]
        if kind == "leaf":
            return next(self.leaves)
        if kind == "constant":
            return spec[3].value
        if kind == "object":
            return spec[2].value
        if kind == "again":
            return self.objects[spec[1]]
        if kind in (tuple, torch.Size):
            return kind(self._all(spec[1]))
        if kind in (list, dict, OrderedDict):
            return self._container(kind, spec[1])
        if kind == "namedtuple":
            return spec[1](*self._all(spec[2]))
        if kind == "registered":
            return pytree.SUPPORTED_NODES[spec[1]].unflatten_fn(self._all(spec[3]), spec[4].value)
        return self._object(*spec[1:])

    def _all(self, specs: Iterable[Spec]) -> list[Any]:
        return [self.build(spec) for spec in specs]

    def _container(self, kind: Any, parts: Any) -> Any:
        built = kind()
        self.objects.append(built)
        if kind is list:
            built.extend(self._all(parts))
        else:
            built.update((key, self.build(part)) for key, _, part in parts)
        return built

    def _object(self, kind: Any, names: Sequence[str], parts: Sequence[Spec]) -> Any:
        built = object.__new__(kind)
        self.objects.append(built)
        for name, part in zip(names, parts, strict=True):
            object.__setattr__(built, name, self.build(part))
        return built
