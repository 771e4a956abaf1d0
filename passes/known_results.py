"""Facts of a graph's values without running an operator twice on tensors of the same kind.

A model repeats its layers.  What an operator gives on fake tensors (dtype, sizes, strides, gradient) follows
from the kinds of its tensors, its other arguments and the gradient mode alone; so a second call with equal
ones is answered from the first, by a stand-in.  A stand-in becomes a fake tensor only when an operator that
was not seen yet asks for it.

Run every time are operators that write to an argument.  Where a graph has one, so are those whose results
share memory with an argument: a write to such a result reaches the argument, too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from fxamp.ir.facts import Facts, fact_of
from fxamp.ir.operators import is_inplace

__all__ = ["Kind", "KnownResults", "StandIn", "facts_of", "kind_of", "real"]


class Kind(NamedTuple):
    """All of a fake tensor that the result of an operator can depend on."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    requires_grad: bool

    def make(self) -> torch.Tensor:
        """A fake tensor of this kind, not a leaf if it has a gradient; in the fake mode that is active."""
        steps = zip(self.strides, self.shape, strict=True)
        reach = 0 if 0 in self.shape else 1 + sum(stride * (size - 1) for stride, size in steps)
        memory = torch.empty(self.offset + reach, dtype=self.dtype, device=self.device)
        with torch.enable_grad():
            if self.requires_grad:
                memory = memory.requires_grad_().clone()
            return memory.as_strided(self.shape, self.strides, self.offset)


class StandIn:
    """A value whose kind and facts are known; it is made when somebody needs it.

    Args:
        kind: What it is, until an operator writes to it.
        facts: What is known of it.
        make: Makes it.
    """

    __slots__ = ("facts", "kind", "made", "make")

    def __init__(self, kind: Kind, facts: Facts, make: Callable[[], torch.Tensor]) -> None:
        self.kind, self.facts, self.make = kind, facts, make
        self.made: torch.Tensor | None = None

    def tensor(self) -> torch.Tensor:
        """The fake tensor, the same one each time."""
        if self.made is None:
            self.made = self.make()
        return self.made


class KnownResults:
    """The results of the calls in one run of *graph*, in a fake mode."""

    def __init__(self, graph: Graph) -> None:
        targets = {node.target for node in graph.nodes}
        self._writes = any(isinstance(target, OpOverload) and is_inplace(target) for target in targets)
        self._known: dict[Any, Any] = {}

    def call(self, target: Callable[..., object], args: Any, kwargs: Any) -> Any:
        """The result of ``target(*args, **kwargs)``; tensors in it may be stand-ins."""
        if target is operator.getitem:
            return target(*args)
        key = self._key(target, args, kwargs)
        if key is not None and key in self._known:
            return _map(self._known[key], _stand_in)
        args, kwargs = map_aggregate((args, kwargs), real)
        value = target(*args, **kwargs)
        if key is not None and not (self._writes and _share_memory(value, (args, kwargs))):
            with suppress(_UnknownKindError):
                self._known[key] = _map(value, _known)
        return value

    def _key(self, target: Callable[..., object], args: Any, kwargs: Any) -> Any:
        if not isinstance(target, OpOverload) or is_inplace(target):
            return None
        try:
            key = (target, torch.is_grad_enabled(), self._frozen(args), self._frozen(tuple(kwargs.items())))
            hash(key)
        except (TypeError, _UnknownKindError):
            return None
        return key

    def _frozen(self, value: Any) -> Any:
        if isinstance(value, StandIn) and (value.made is None or not self._writes):
            return value.kind
        if isinstance(value, (StandIn, torch.Tensor)):
            return kind_of(real(value))
        if isinstance(value, (tuple, list)):
            return (type(value) is list, *map(self._frozen, value))
        return (type(value), value)


class _UnknownKindError(Exception):
    """A value has more to it than a kind tells."""


def facts_of(value: object) -> Facts:
    """The facts of a result, in which there may be stand-ins."""
    if isinstance(value, StandIn):
        return value.facts
    if isinstance(value, (list, tuple)):
        return tuple(facts_of(item) for item in value)
    return fact_of(value)


def real(value: Any) -> Any:
    """The fake tensor that a stand-in stands for; anything else as it is."""
    return value.tensor() if isinstance(value, StandIn) else value


def kind_of(tensor: torch.Tensor) -> Kind:
    """The kind of a fake tensor, if that is all there is to it."""
    plain = isinstance(tensor, FakeTensor) and tensor.constant is None and tensor.layout is torch.strided
    if not plain or tensor.is_conj() or tensor.is_neg():
        raise _UnknownKindError
    shape, strides, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    if not all(type(number) is int for number in (*shape, *strides, offset)):
        raise _UnknownKindError
    return Kind(tensor.dtype, tensor.device, shape, strides, cast("int", offset), tensor.requires_grad)


@dataclass(frozen=True)
class _Known:
    """What is remembered of a tensor."""

    kind: Kind
    facts: Facts


def _known(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Known(kind_of(value), fact_of(value))
    if value is None or type(value) in (bool, int, float):
        return value
    raise _UnknownKindError


def _stand_in(known: Any) -> Any:
    return StandIn(known.kind, known.facts, known.kind.make) if isinstance(known, _Known) else known


def _map(value: Any, function: Callable[[Any], Any]) -> Any:
    """*value* with ``function(item)`` in the place of each item of its lists and tuples."""
    if isinstance(value, (list, tuple)):
        items = [_map(item, function) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return function(value)


def _share_memory(value: Any, arguments: Any) -> bool:
    """Whether two tensors of a result do, or one of it and an argument."""
    results, given = _memories(value), _memories(arguments)
    return len({*results}) < len(results) or not {*results}.isdisjoint(given)


def _memories(value: Any) -> list[int]:
    tensors = [item for item in pytree.tree_leaves(value) if isinstance(item, torch.Tensor)]
    return [tensor.untyped_storage()._cdata for tensor in tensors]
