"""The tensors that the programs of a frozen module read instead of computing them in each call.

A tensor is computed once, however many programs read it: by the operators that it comes from, and the very
tensors that they are given, weights, constants and buffers.  Those stay as they are, in the module tree, so
that ``state_dict`` has them and can be loaded; only an exported artifact goes without them.  Where one has
been written to, the tensors that are derived of it are computed anew, in their place.

A version tells that a tensor was written to, if it was written to in the usual ways.  ``forward`` may do so
in others (``buffer.data``, the statistics of ``batch_norm``) and put another tensor in the place of a buffer.
So what is derived of a buffer is *unsettled* as soon as anything in the frozen module might do that to it: a
program that writes to the buffer, eager code, another tensor in its place.  From then on it is computed anew
in each call.

What they hold was computed with the number of threads, and the flags of the back ends, of that moment; with
its default dtype also when they are computed anew, since a program serves calls of one default dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter, is_
from typing import Any

import torch
from torch.fx import Node

from fxamp.errors import CaptureError, InvariantError
from fxamp.ir.derivation import Derivation
from fxamp.ir.facts import Fact
from fxamp.ir.operators import is_impure, is_plain_cast
from fxamp.ir.where import locate
from fxamp.passes.movements import moved_inputs
from fxamp.runtime.lower import lower
from fxamp.runtime.watch import Slot

__all__ = ["Derived", "DerivedWeights", "has_version"]

_VERSION = attrgetter("_version")


class Derived:
    """A tensor that is computed from others.

    Args:
        derivation: How.
        sources: Where those are that it is computed from.
        buffers: Which of these are places of buffers, where another tensor may be put.

    Attributes:
        sources: The tensors that it was computed from.
        buffers: The same as the argument.
        settled: Whether it is computed anew only where a version tells that it has to be.
        value: The tensor, of the dtype, sizes and strides that the operators give.
    """

    def __init__(self, derivation: Derivation, sources: Sequence[Slot], buffers: Sequence[Slot] = ()) -> None:
        self._derivation, self._slots, self.buffers = derivation, tuple(sources), tuple(buffers)
        self.sources = self._read()
        self.settled = True
        self._run: Callable[..., Any] = lower(derivation.graph).run
        self._default_dtype = torch.get_default_dtype()
        self._versions: list[int] | None = self._now()
        self.value = self._computed(self._run)

    def refresh(self) -> None:
        """Compute the tensor anew if one that it is derived of was written to, or may have been."""
        if self.buffers and not self._follow():
            return
        now = self._now() if self.settled else None
        if now is None or now != self._versions:
            self._versions = now
            with torch.inference_mode(mode=False), torch.no_grad():
                self.value.copy_(self._computed(self._run))

    def reads(self, slot: Slot) -> bool:
        """Whether it is computed from the buffer in *slot*."""
        return any(holder is slot[0] and name == slot[1] for holder, name in self.buffers)

    def _follow(self) -> bool:
        """Take the tensors that are there now; whether they are like those before."""
        found = [holder.get(name) for holder, name in self._slots]
        if all(map(is_, found, self.sources)):
            return True
        self.settled = False
        if not all(map(_is_like, found, self.sources)):  # no program that reads the value serves a call now
            return False
        self.sources = self._read()
        return True

    def _read(self) -> tuple[torch.Tensor, ...]:
        return tuple([holder[name] for holder, name in self._slots])

    def unrounded(self) -> torch.Tensor | None:
        """The tensor without its casts, computed now; ``None`` if anything computes with what they give."""
        written = any(node.op == "call_function" and is_impure(node) for node in self._derivation.graph.nodes)
        casts = None if written else _last_casts(self._derivation.result())
        return None if casts is None else self._computed(lower(self._derivation.without(casts)).run)

    def _now(self) -> list[int]:
        return list(map(_VERSION, self.sources))

    def _computed(self, run: Callable[..., Any]) -> torch.Tensor:
        with (
            torch.inference_mode(mode=False),
            torch.no_grad(),
            torch._C._DisableAutocast(),
            _default_dtype(self._default_dtype),
        ):
            (value,) = run((), self.sources)
        assert isinstance(value, torch.Tensor)
        return value


class DerivedWeights:
    """The derived tensors of one frozen module."""

    def __init__(self) -> None:
        self._derived: dict[Hashable, Derived] = {}

    def of(self, node: Node, sources: Sequence[Slot], buffers: Sequence[Slot] = ()) -> Derived:
        """The one tensor for *node*, which was made for a derivation; computed if there is none yet.

        Args:
            node: Stands for the tensor in a graph.
            sources: Where the tensors are that it is derived of.
            buffers: Those among them that are buffers.

        Raises:
            InvariantError: It has another dtype or other sizes than the node.
            CaptureError: torch cannot compute it.
        """
        derivation: Derivation = node.meta["derived"]
        # It keeps the sources alive.
        read = tuple(id(holder[name]) for holder, name in sources)
        places = tuple((id(holder), name) for holder, name in buffers)
        key = derivation.key, read, places, torch.get_default_dtype()
        if key not in self._derived:
            try:
                derived = Derived(derivation, sources, buffers)
            except RuntimeError as error:  # torch has no kernel for it, say: then the call has none either
                what = f"what depends on weights alone cannot be computed, at {locate(node)}"
                raise CaptureError(f"{what}: {error}") from error
            _check(node, derived.value)
            self._derived.setdefault(key, derived)  # another thread may have been faster
        return self._derived[key]

    def all(self) -> tuple[Derived, ...]:
        """All that there are."""
        return tuple(self._derived.values())


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """With *dtype* as the default; it is one of the process, so it is not set where it is so already."""
    before = torch.get_default_dtype()
    if before is dtype:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def has_version(tensor: torch.Tensor) -> bool:
    """Whether a plain *tensor* tells that it was written to."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return plain and not tensor.is_inference()


def _is_like(found: torch.Tensor | None, before: torch.Tensor) -> bool:
    if type(found) is not type(before):
        return False
    return (found.dtype, found.device, found.shape) == (before.dtype, before.device, before.shape)


def _last_casts(node: Node) -> list[Node] | None:
    """The casts whose results *node* only moves; ``None`` where it moves anything else."""
    if is_plain_cast(node):
        return [node]
    found = [_last_casts(moved) for moved in moved_inputs(node) or ()]
    if not found or None in found:
        return None
    return [cast for casts in found if casts is not None for cast in casts]


def _check(node: Node, value: torch.Tensor) -> None:
    fact: Fact = node.meta["fact"]
    if value.dtype is not fact.dtype or tuple(value.shape) != fact.shape:
        raise InvariantError(
            f"what depends on weights alone is {value.dtype} {tuple(value.shape)} where it was to be {fact}, "
            f"at {locate(node)}"
        )
