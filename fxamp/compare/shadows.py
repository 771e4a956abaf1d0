"""For each tensor of the run that is watched, the tensor that the reference has in its place.

The reference repeats every operator on the shadows of its arguments, views and writes included, so shadows
share memory where the tensors do.  A shadow lives as long as its tensor.  A tensor that no operator made
(an input, a parameter, a buffer) gets its shadow when it is first used.  If it has the reference's dtype,
that is the tensor itself, until the run writes to it: then all shadows in that memory move to a copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["Shadow", "Shadows", "Storages", "map_tensors", "tensors_in", "widen"]

_WIDER = {torch.complex32: torch.complex64}
_WIDEST = {torch.complex32: torch.complex128, torch.complex64: torch.complex128}


def widen(dtype: torch.dtype, reference: torch.dtype) -> torch.dtype:
    """The dtype that the reference uses for *dtype*: floating ones are at least as wide as *reference*."""
    if dtype.is_complex:
        return (_WIDEST if reference is torch.float64 else _WIDER).get(dtype, dtype)
    if not dtype.is_floating_point or dtype.itemsize >= reference.itemsize:
        return dtype
    return reference


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """*value* with ``function(tensor)`` for each tensor in its lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        items = [map_tensors(item, function) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {key: map_tensors(item, function) for key, item in value.items()}
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in *value*'s lists, tuples and dicts."""
    found: list[torch.Tensor] = []
    map_tensors(value, found.append)
    return found


class Storages:
    """A set of storages, each for as long as it lives."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[Any]] = {}

    def add(self, tensor: torch.Tensor) -> None:
        """Add the storage of *tensor*."""
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known[key] = weakref.ref(storage, lambda _: self._known.pop(key, None))

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._known


@dataclass
class Shadow:
    """What is known of a tensor of the run.

    Attributes:
        value: The reference's tensor.
        producer: The row of the operator that made it, through views; ``None`` for what none made.
        bad: Whether it has elements that are not finite where the reference is.
        foreign: Whether it comes from outside of the run.
        noise: Its error in the run over its size, both as root mean squares.
        vanished: The row of the operator that first made 0 of something else, which this was computed from.
    """

    value: torch.Tensor
    producer: Any = None
    bad: bool = False
    foreign: bool = False
    vanished: Any = None
    noise: float = 0.0


class Shadows:
    """The shadows of one run.

    Args:
        reference: float32 or float64.
        grad: Whether parameters become leaves of the reference's own gradient.
        names: What the model's tensors are called, by ``id``.
    """

    def __init__(self, reference: torch.dtype, *, grad: bool, names: dict[int, str]) -> None:
        self.reference, self._grad, self.names = reference, grad, names
        self._known = WeakTensorKeyDictionary()
        self._shared, self._borrowed = Storages(), Storages()
        self.leaves: list[tuple[torch.Tensor, torch.Tensor]] = []

    def known(self, tensor: torch.Tensor) -> Shadow | None:
        """The shadow that *tensor* has."""
        found: Shadow | None = self._known.get(tensor)
        return found

    def of(self, tensor: torch.Tensor) -> Shadow:
        """The shadow of *tensor*, made if it has none."""
        found = self.known(tensor)
        if found is None:
            found = Shadow(self._first(tensor), foreign=True)
            if self._is_kept(tensor):
                self._known[tensor] = found
        return found

    def put(self, tensor: torch.Tensor, shadow: Shadow) -> None:
        """Let *shadow* be that of *tensor*."""
        self._known[tensor] = shadow

    def share(self, value: torch.Tensor) -> None:
        """Note that *value* stands for two tensors, of which one may be written to."""
        self._shared.add(value)

    def separate(self, tensor: torch.Tensor) -> None:
        """Before a write to *tensor*: its shadow gets memory of its own if it stands for others too."""
        shadow = self._known[tensor] = self.of(tensor)
        if shadow.value in self._borrowed and not shadow.value.requires_grad:
            self._move(shadow.value)
        elif shadow.value in self._shared or shadow.value in self._borrowed:
            shadow.value = shadow.value.clone()

    def _move(self, value: torch.Tensor) -> None:
        """Give all shadows in the memory of *value* one memory of their own."""
        storage = value.untyped_storage()
        copy = storage.clone()
        for shadow in self._known.values():
            held = shadow.value
            if held.layout is torch.strided and held.untyped_storage()._cdata == storage._cdata:
                moved = torch.empty(0, dtype=held.dtype, device=held.device)
                shadow.value = moved.set_(copy, held.storage_offset(), held.size(), held.stride())

    def _is_kept(self, tensor: torch.Tensor) -> bool:
        """Whether the shadow of a tensor from outside is worth its memory: not that of a cast parameter."""
        return not isinstance(tensor, nn.Parameter) or self._grad or tensor.dtype is self._dtype(tensor)

    def _dtype(self, tensor: torch.Tensor) -> torch.dtype:
        return widen(tensor.dtype, self.reference)

    def _first(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self._dtype(tensor)
        if tensor.requires_grad and tensor.is_leaf and self._grad:
            leaf = tensor.detach().to(dtype).requires_grad_()
            self.leaves.append((tensor, leaf))
            return leaf
        if tensor.dtype is not dtype:
            return tensor.detach().to(dtype)
        value = tensor.detach() if tensor.requires_grad and self._grad else tensor
        self._borrowed.add(value)
        return value
