"""A call is recorded in segments: it ends one wherever Python, or a kernel, needs a value.

``x.item()``, ``if x.any():``, ``x.nonzero()``, or an operator that fake tensors refuse: what fake tensors
cannot answer, real ones can.  So what is recorded so far becomes one segment and is run for real, then the
operator is.  Its results begin the next segment as new fake tensors and symbols, and the model's Python,
which was waiting for the answer, goes on.  What it decides from the answer is a guard of that next segment;
a later call that decides otherwise is recorded from there as another branch.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxamp.capture.attribute_reads import Read
from fxamp.capture.dtype_reads import DtypeRead
from fxamp.capture.guards import Opening
from fxamp.capture.sources import Place, Source
from fxamp.capture.structure import Spec
from fxamp.capture.symbols import Sizes
from fxamp.errors import CaptureError
from fxamp.ir.regions import Region
from fxamp.policy.scopes import PlacedPolicy

__all__ = [
    "Captured",
    "Carried",
    "NeedsValuesError",
    "Number",
    "Origin",
    "Outer",
    "Recording",
    "Value",
    "Walk",
    "are_held",
]


class NeedsValuesError(CaptureError):
    """The call reads values of tensors, and can be captured only while it is run."""


@dataclass(frozen=True)
class Value:
    """An input of a segment that an earlier one left: its number among all values of the call."""

    index: int


@dataclass(frozen=True)
class Number:
    """An input of a segment that is a size or a number read earlier."""

    symbol: sympy.Symbol


@dataclass(frozen=True)
class Outer:
    """An input of a block: a node of the graph that the block is in."""

    node: Node


Origin: TypeAlias = "Value | Number | Outer"


@dataclass(frozen=True)
class Block:
    """A part of a call in a graph of its own.

    Attributes:
        module: The graph.
        inputs: The nodes outside that its inputs stand for.
        outputs: The fake tensors that it gives.
    """

    module: GraphModule
    inputs: tuple[Node, ...]
    outputs: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Recording:
    """A graph and what its inputs stand for.

    Attributes:
        graph: Inputs, sources, operators, output.
        sources: Where each ``get_attr`` node's tensor lives.
        origins: What each input is, in order.
    """

    graph: Graph
    sources: dict[Node, Source]
    origins: tuple[Origin, ...]


@dataclass(frozen=True)
class Captured:
    """One recorded segment of a call; most calls have one.

    Attributes:
        graph: Inputs, then sources, then operators; the outputs of the last segment are the result's
            tensors, then the tensors that are put back into attributes; those of the others are the
            values that Python still held.
        region: The state of autocast that the segment began in.
        fakes: The mode that the fake tensors in ``node.meta["val"]`` live in.
        env: What is known of their sizes.
        sources: Where each ``get_attr`` node's tensor lives.
        origins: What each input is, in order.
        opening: The values it began with; the passes may still add guards on their sizes.
        grad: Whether gradients were recorded at the start.
        result: The structure of the result; ``None`` but for the last segment.
        changed: Which of the call's mutable objects hold something else afterwards; then the result is the
            pair of the model's result and of what they hold.
        rebound: Where the trailing outputs go, one place each.
        operator: The operator whose results the next segment begins with.
        blocks: The graphs of its checkpointed parts, by name.
        positions: Which tensors of the segment are its outputs, counted as they were recorded, and by
            which operators.
        reads: The attributes of modules that Python read in it.
        dropped: Which values nobody needs any more once the segment has run.
        placed: The policy that its operators were called under, if it is not torch's own.
        meant: Which overrides of the policy, by their places, mean one of its operators.
        dtypes_read: The dtypes that the model's Python asked for so far, under such a policy.
    """

    graph: Graph
    region: Region
    fakes: FakeTensorMode
    env: ShapeEnv
    sources: dict[Node, Source]
    origins: tuple[Origin, ...]
    opening: Opening
    grad: bool
    result: Spec | None = None
    changed: tuple[int, ...] = ()
    rebound: tuple[Place, ...] = ()
    operator: Recording | None = None
    blocks: dict[str, GraphModule] = field(default_factory=dict)
    positions: tuple[tuple[int, str], ...] = ()
    reads: tuple[Read, ...] = ()
    dropped: tuple[int, ...] = ()
    placed: PlacedPolicy | None = None
    meant: frozenset[int] = frozenset()
    dtypes_read: tuple[DtypeRead, ...] = ()


class Walk(Protocol):
    """The real call beside a recording."""

    @property
    def following(self) -> bool:
        """Whether the call has begun with programs that were there already."""

    def begin(self, sizes: Sizes) -> None:
        """A recording starts; a second one is made where symbolic *sizes* were too much for the model."""

    def expected(self) -> tuple[tuple[int, str], ...] | None:
        """The outputs of the next segment if it has run already, as :attr:`Captured.positions`."""

    def advance(self, segment: Captured) -> tuple[Spec, Sequence[Any]]:
        """Run *segment* and the operator at its end: the structure of the operator's result, its values."""


@dataclass
class Carried:
    """The values that the segments so far have left, as the recorder sees them.

    Attributes:
        tensors: By ``id``, a fake tensor that Python may still use, and its number.
        symbols: The sizes and numbers that can be read, as symbolic numbers.
        count: How many values there are.
    """

    tensors: dict[int, tuple[FakeTensor, int]] = field(default_factory=dict)
    symbols: dict[sympy.Symbol, Any] = field(default_factory=dict)
    count: int = 0

    def add(self, value: object) -> None:
        """Give *value* the next number."""
        if isinstance(value, FakeTensor):
            self.tensors[id(value)] = (value, self.count)
        self.count += 1

    def drop_dead(self, needed: set[int], used: Container[int]) -> tuple[int, ...]:
        """Forget the tensors that Python does not refer to, but for *needed* ones; give their numbers.

        Args:
            needed: The ids of some.
            used: The ids of those that the recorder has in the present segment, which it refers to twice.
        """
        dead: list[int] = []
        for known, keys in (
            (1, [key for key in self.tensors if key not in used]),
            (3, [key for key in self.tensors if key in used]),
        ):
            held = are_held([self.tensors[key][0] for key in keys], known)
            dead += [key for key, alive in zip(keys, held, strict=True) if not alive and key not in needed]
        return tuple(self.tensors.pop(key)[1] for key in dead)


def are_held(tensors: Sequence[torch.Tensor], known: int) -> list[bool]:
    """For each of *tensors*, whether there are more references than *known* ones and the sequence's."""
    probe = object()  # is referred to by the sequence alone
    counts = [sys.getrefcount(item) for item in _with(tensors, probe)]
    probe_only = counts.pop() - 1  # this function holds the probe, too
    # the sequence that was given, and the one with the probe
    return [count > probe_only + known + 1 for count in counts]


def _with(tensors: Sequence[object], probe: object) -> list[object]:
    return [*tensors, probe]
