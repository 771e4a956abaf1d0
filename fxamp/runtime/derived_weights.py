"""The tensors that the programs of a frozen module read instead of computing them in each call.

A tensor is computed once, however many programs read it: by the operators that it comes from, and the very
tensors that they are given.  Those stay as they are, in the module tree, so that ``state_dict`` has them and
can be loaded; only an exported artifact goes without them.  Where one has been written to, the tensors that
are derived of it are computed anew, in their place; so they are where a buffer is another tensor now.

What they hold was computed with the number of threads, and the flags of the back ends, of that moment; with
its default dtype also when they are computed anew, since a program serves calls of one default dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch.fx import Node

from fxamp.errors import InvariantError
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
        sources: From which.
        slots: Where each is read anew, a buffer, say; ``None`` for one that stays the same tensor.

    Attributes:
        sources: Those that it is computed from at present.
        slots: Where those are that are read anew.
        value: The tensor, of the dtype, sizes and strides that the operators give.
    """

    def __init__(
        self, derivation: Derivation, sources: Sequence[torch.Tensor], slots: Sequence[Slot | None]
    ) -> None:
        self._derivation, self.sources = derivation, tuple(sources)
        self._changing = {index: slot for index, slot in enumerate(slots) if slot is not None}
        self.slots = tuple(self._changing.values())
        self._run: Callable[..., Any] = lower(derivation.graph).run
        self._default_dtype = torch.get_default_dtype()
        self._versions = self._now()
        self.value = self._computed(self._run)

    def refresh(self) -> bool:
        """Compute the tensor anew if one that it is derived of was written to, or is another one.

        Returns:
            Whether it is right; not where one that is read anew is of another kind, or cannot be watched.
        """
        replaced = {index: holder.get(name) for index, (holder, name) in self._changing.items()}
        replaced = {index: now for index, now in replaced.items() if now is not self.sources[index]}
        if replaced:
            if not all(now is not None and _is_like(now, self.sources[i]) for i, now in replaced.items()):
                return False
            self.sources = tuple(replaced.get(i, source) for i, source in enumerate(self.sources))  # type: ignore[misc]
        now = self._now()
        if replaced or now != self._versions:
            self._versions = now
            with torch.inference_mode(mode=False), torch.no_grad():
                self.value.copy_(self._computed(self._run))
        return True

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

    def of(
        self, node: Node, sources: Sequence[torch.Tensor], slots: Sequence[Slot | None] | None = None
    ) -> Derived:
        """The one tensor for *node*, which was made for a derivation; computed if there is none yet.

        Args:
            node: A source.
            sources: The tensors that it is derived of.
            slots: As for :class:`Derived`; by default none of them is read anew.

        Raises:
            InvariantError: It has another dtype or other sizes than the node.
        """
        derivation: Derivation = node.meta["derived"]
        # It keeps the sources alive.
        slots = [None] * len(sources) if slots is None else slots
        places = tuple(None if slot is None else (id(slot[0]), slot[1]) for slot in slots)
        key = derivation.key, tuple(map(id, sources)), places, torch.get_default_dtype()
        if key not in self._derived:
            derived = Derived(derivation, sources, slots)
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


def _is_like(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether *one* is in all but its elements as *other*, and tells that it was written to."""
    return has_version(one) and (one.dtype, one.shape, one.stride(), one.device) == (
        other.dtype,
        other.shape,
        other.stride(),
        other.device,
    )


def has_version(tensor: torch.Tensor) -> bool:
    """Whether a plain *tensor* tells that it was written to."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return plain and not tensor.is_inference()


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
