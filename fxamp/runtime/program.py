"""A program: one captured and rewritten segment of a call, ready to run, with the conditions for it.

Most calls are one segment.  Where the model reads values of tensors a call has several: a program then ends
with the operator that reads, and its branches are the programs that go on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C import _DisableAutocast, _is_any_autocast_enabled
from torch.fx import GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule

from fxamp.capture.guards import Guard
from fxamp.capture.structure import Spec, mutable_objects, set_contents, unflatten
from fxamp.capture.symbols import Sizes
from fxamp.ir.region_code import RegionCode, is_named
from fxamp.runtime.attribute_watch import AttributeWatch
from fxamp.runtime.cast_history import CastHistory
from fxamp.runtime.cast_scope import CastScope
from fxamp.runtime.cells import Cells
from fxamp.runtime.frozen_weights import FrozenTensors
from fxamp.runtime.lower import FlatCode
from fxamp.runtime.packed_code import PackedCode
from fxamp.runtime.watch import Slot, TensorWatch

__all__ = ["Branch", "Inputs", "Operator", "Program", "with_code"]


Inputs = tuple[tuple[bool, int], ...]
"""For each input whether it is a number, and its place among the numbers or the values of the call."""


@dataclass(frozen=True)
class Operator:
    """The operator that ends a segment.

    Attributes:
        module: A graph of this operator alone.
        code: The flat code that is run; its one output is the operator's result.
        inputs: What it gets.
    """

    module: GraphModule
    code: FlatCode
    inputs: Inputs
    _watch: TensorWatch

    @property
    def reads(self) -> bool:
        """Whether there are tensors of the model among its arguments."""
        return not self._watch.is_empty

    def tensors(self) -> list[torch.Tensor]:
        """The model's tensors among its arguments, read now."""
        tensors = self._watch.read()
        assert tensors is not None, "the tensors of an operator changed within a call"
        return tensors

    def run(self, values: Sequence[Any]) -> Any:
        """The operator's result."""
        tensors = self.tensors()
        return _run(self.code, values, tensors)[0]


@dataclass(frozen=True)
class Branch:
    """A way on from the end of a segment.

    Attributes:
        key: What the results of its operator must look like: structure, dtypes, devices ...
        program: The next segment, whose guard tells for which values.
    """

    key: Any
    program: Program


@dataclass(frozen=True, eq=False)
class Program:
    """What serves the calls of one signature, or the rest of a call.

    Attributes:
        module: The rewritten graph; its attributes are the model's own tensors.
        code: The flat code that is run.
        packed: What has other code where packed weights may be read; the bits are the same.
        guard: Which sizes, and which numbers read, it serves.
        sizes: Which sizes were symbolic when it was captured.
        inputs: What it gets, from the values of the call; those of a first segment are the call's own.
        result: The structure of the result; ``None`` for a segment that is not the last.
        changed: See :class:`~fxamp.capture.segments.Captured`.
        refers: Whether the result refers to mutable objects of the call.
        kept: The tensors, by ``id``, of which one cast is kept for the length of a region.
        positions: See :class:`~fxamp.capture.segments.Captured`.
        dropped: Likewise.
        operator: What ends the segment if it is not the last.
        training: Whether the module was in training mode.
        grad: Whether gradients were recorded.
        scoped: Whether it shares casts with its blocks, in a cast scope.
        written: Which of its inputs, and which of the model's tensors, a segment writes to that is not the
            last.
        branches: The programs that go on from there.
        casts: The casts that eager autocast makes there, and those that the passes took out.
    """

    module: GraphModule
    code: FlatCode
    guard: Guard
    sizes: Sizes
    inputs: Inputs
    result: Spec | None
    changed: tuple[int, ...]
    refers: bool
    kept: frozenset[int]
    positions: tuple[tuple[int, str], ...]
    dropped: tuple[int, ...]
    operator: Operator | None
    written: tuple[tuple[int, ...], tuple[int, ...]]
    _watch: TensorWatch | FrozenTensors
    _attributes: AttributeWatch
    _write_back: tuple[Slot, ...]
    _single: bool = field(default=False)
    scoped: bool = False
    packed: PackedCode | None = None
    training: bool = False
    grad: bool = False
    branches: list[Branch] = field(default_factory=list)
    casts: CastHistory = field(default_factory=CastHistory)

    def tensors(self) -> list[torch.Tensor] | None:
        """The parameters, buffers and constants, read now; ``None`` if the model is not as captured."""
        return self._watch.read() if self._attributes.hold() else None

    def holds(self) -> bool:
        """Whether the attributes that it rests on are as they were."""
        return self._attributes.hold()

    def gather(self, cells: Cells) -> None:
        """Add the attributes that it rests on, which hold, to *cells*."""
        self._attributes.gather(cells)

    @property
    def tensors_of_same(self) -> Callable[[], list[torch.Tensor] | None]:
        """What gives the same as :meth:`tensors`, where those cells are the same."""
        return self.tensors if self._attributes.has_rest else self._watch.read

    @property
    def rests_on_model(self) -> bool:
        """Whether it reads tensors or attributes of the model."""
        return not (self._watch.is_empty and self._attributes.is_empty)

    def is_settled(self) -> bool:
        """Whether all tensors that it reads may be taken as they are, until a version tells otherwise."""
        return not isinstance(self._watch, FrozenTensors) or self._watch.settled

    @property
    def is_plain(self) -> bool:
        """Whether a call is one run of the code, and nothing else is to be done."""
        return self.operator is None and not (self.changed or self.refers or self._write_back or self.scoped)

    def difference(self) -> str:
        """What about the model is not as captured, for people; ``""`` if it is."""
        return self._attributes.difference() or self._watch.difference()

    def run(self, leaves: Sequence[Any], tensors: Sequence[torch.Tensor], call: Any = None) -> Any:
        """The result of the call, in the structure that the model gives it, of a last segment.

        Args:
            leaves: What the inputs stand for.
            tensors: What :meth:`tensors` gave.
            call: ``(args, kwargs)`` of the call.
        """
        if self._single and not self.scoped and self.packed is None and not _is_any_autocast_enabled():
            return self.code.run(leaves, tensors)[0]
        if self.scoped:
            with CastScope():
                outputs = self.outputs(leaves, tensors)
        else:
            outputs = self.outputs(leaves, tensors)
        if self._single:
            return outputs[0]
        if self._write_back:
            kept = len(outputs) - len(self._write_back)
            for (slots, name), value in zip(self._write_back, outputs[kept:], strict=True):
                slots[name] = value
        assert self.result is not None
        objects = mutable_objects(call) if self.refers else []
        result = unflatten(self.result, outputs, objects)
        if not self.changed:
            return result
        for index, now in zip(self.changed, result[1], strict=True):
            set_contents(objects[index], now)
        return result[0]

    def outputs(self, leaves: Sequence[Any], tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """The outputs of the graph."""
        code = self.code if self.packed is None else self.packed.choose(leaves)
        return _run(code, leaves, tensors)

    def modules(self) -> tuple[GraphModule, ...]:
        """The graphs of this segment: its own, and that of the operator at its end."""
        return (self.module,) if self.operator is None else (self.module, self.operator.module)

    def tree(self) -> list[Program]:
        """This program and all that go on from it."""
        return [self, *(below for branch in list(self.branches) for below in branch.program.tree())]


def _run(code: FlatCode, leaves: Sequence[Any], tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    if _is_any_autocast_enabled():
        with _DisableAutocast():
            return code.run(leaves, tensors)
    return code.run(leaves, tensors)


def with_code(module: GraphModule) -> GraphModule:
    """*module* with its Python code, which nobody has needed so far: programs run flat code."""
    for child in module.modules():
        if isinstance(child, GraphModule):
            if any(is_named(value) for node in child.graph.nodes for value in node.args):
                child.graph.set_codegen(RegionCode(child.graph))
            _LazyGraphModule.force_recompile(child)
    return module
