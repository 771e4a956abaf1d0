"""A program: one captured and rewritten segment of a call, ready to run, with the conditions for it.

Most calls are one segment.  Where the model reads values of tensors a call has several: a program then ends
with the operator that reads, and its branches are the programs that go on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._C import _DisableAutocast, _is_any_autocast_enabled
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule

from fxamp.capture.capture import plain_saved_tensors
from fxamp.capture.guards import Guard, shape_guard
from fxamp.capture.segments import Captured, Number, Origin, Outer
from fxamp.capture.sources import Constant, Place, Source
from fxamp.capture.structure import Spec, mutable_objects, set_contents, unflatten
from fxamp.capture.symbols import Sizes
from fxamp.ir.blocks import Checkpointed, is_source
from fxamp.ir.cost import note_sizes
from fxamp.ir.region_code import RegionCode, is_named
from fxamp.passes import build_pipeline, run_passes
from fxamp.passes.base import graphs_of
from fxamp.policy import Policy
from fxamp.runtime.attribute_watch import AttributeWatch
from fxamp.runtime.cast_history import CastHistory, CastLog
from fxamp.runtime.cast_scope import cast_scope
from fxamp.runtime.cast_scope import keep_cast as keep
from fxamp.runtime.frozen_weights import FrozenTensors, FrozenWeights
from fxamp.runtime.lower import FlatCode, lower
from fxamp.runtime.packed_code import PackedCode
from fxamp.runtime.undo import written
from fxamp.runtime.watch import Slot, TensorWatch

__all__ = ["Branch", "Operator", "Program", "build_program", "with_code"]

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
        if self.scoped:
            with cast_scope():
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


def build_program(
    captured: Captured,
    function: Callable[..., object] | nn.Module,
    policy: Policy,
    sizes: Sizes,
    keep_cast: Callable[..., torch.Tensor] | None = None,
    weights: FrozenWeights | None = None,
) -> Program:
    """Rewrite *captured* under *policy* and lower it.

    Args:
        captured: One segment of a call.
        function: What was called, a module or a plain function.
        policy: Which operators are cast.
        sizes: Which sizes were symbolic.
        keep_cast: See :func:`~fxamp.runtime.lower.lower`.
        weights: Those of a frozen module, which are not cast.

    Raises:
        FrozenError: The program needs float32 values that the frozen module does not have.
        CaptureError: The graph has another gradient history than the model.
        PolicyError: The policy is not torch's own, and the model sees the difference.
        InvariantError: A pass is at fault.
    """
    root = function if isinstance(function, nn.Module) else nn.Module()
    module = _graph_module(captured.graph, captured.sources, root, captured.blocks)
    names: set[object] = set()
    if captured.operator or weights is not None:
        names = {node.target for node in written(captured.graph)}
    casts = CastLog()
    with plain_saved_tensors(), torch._C.DisableTorchFunction():  # no default device of the user's, say
        run_passes(module, build_pipeline(captured, policy), casts)
    slots = own = _slots(module.graph, captured.sources, root)
    sources = captured.sources
    if weights is not None:
        sources = weights.fold(module, sources, root, names, casts)
        meta, module = module.meta, _graph_module(module.graph, sources, root, captured.blocks)
        module.meta.update(meta)
        slots = _slots(module.graph, sources, root)
        module.graph.lint()
    keeps = keep if captured.blocks else keep_cast
    code = lower(module.graph, keeps)
    packed = None if weights is None else weights.packed_code(module.graph, sources, keeps, code)
    operator = _operator(captured, root)
    module.meta["sizes"] = dict(captured.env.replacements)
    _forget_fakes(module)
    module.recompile()
    return Program(
        module=module,
        code=code,
        packed=packed,
        guard=shape_guard(captured.opening, captured.env),
        sizes=sizes,
        inputs=_inputs(captured.origins, captured),
        result=captured.result,
        changed=captured.changed,
        refers=bool(captured.changed) or _refers(captured.result),
        kept=_kept(captured, module, root),
        positions=captured.positions,
        dropped=captured.dropped,
        operator=operator,
        written=_positions(module.graph, names),
        _watch=TensorWatch(slots, root)
        if weights is None
        else weights.watch(module.graph, sources, slots, root),
        _attributes=AttributeWatch(captured.reads, [*own, *slots]),
        _write_back=tuple((place.slot(root), place.name) for place in captured.rebound),
        _single=captured.result == ("leaf",) and not captured.rebound,
        scoped=bool(captured.blocks),
        casts=casts.history(),
        training=root.training if root is function else False,
        grad=captured.grad,
    )


def _positions(graph: Graph, names: set[object]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where the inputs and sources called *names* are, among those of their kind."""
    kinds = ([n.target for n in graph.nodes if n.op == kind] for kind in ("placeholder", "get_attr"))
    inputs, sources = (tuple(i for i, name in enumerate(of_kind) if name in names) for of_kind in kinds)
    return inputs, sources


def _refers(spec: Any) -> bool:
    """Whether an object of the call, or one that occurs twice, is anywhere in *spec*."""
    if not isinstance(spec, tuple) or not spec:
        return False
    return (len(spec) == 2 and spec[0] == "again") or any(map(_refers, spec))


def _operator(captured: Captured, root: nn.Module) -> Operator | None:
    recording = captured.operator
    if recording is None:
        return None
    module = _graph_module(recording.graph, recording.sources, root)
    code = lower(recording.graph)
    watch = TensorWatch(_slots(recording.graph, recording.sources, root), root)
    _forget_fakes(module)
    return Operator(module, code, _inputs(recording.origins, captured), watch)


def _inputs(origins: Sequence[Origin], captured: Captured) -> Inputs:
    numbers = captured.opening.symbols
    found: list[tuple[bool, int]] = []
    for origin in origins:
        assert not isinstance(origin, Outer), "only a block has inputs from outside of it"
        if isinstance(origin, Number):
            found.append((True, numbers.index(origin.symbol)))
        else:
            found.append((False, origin.index))
    return tuple(found)


def _slots(graph: Graph, sources: dict[Node, Source], root: nn.Module) -> list[Slot]:
    return [_slot(sources[node], root) for node in graph.nodes if is_source(node)]


def _kept(captured: Captured, module: GraphModule, root: nn.Module) -> frozenset[int]:
    casts = [node.args[0] for node in module.graph.nodes if node.meta.get("kept")]
    for node in module.graph.nodes:
        if isinstance(node.target, Checkpointed):
            casts += node.all_input_nodes
    slots = [_slot(captured.sources[node], root) for node in casts if node in captured.sources]
    return frozenset(id(holder[name]) for holder, name in slots)


def _forget_fakes(module: GraphModule) -> None:
    """Drop the fake tensors and symbolic numbers that the passes worked on; facts say what is to be known."""
    for graph in graphs_of(module):
        note_sizes(graph)
        for node in graph.nodes:
            node.meta.pop("val", None)
            node.meta.pop("number", None)


def _slot(source: Place | Constant, root: nn.Module) -> Slot:
    if isinstance(source, Constant):
        return {"constant": source.tensor}, "constant"
    return source.slot(root), source.name


def with_code(module: GraphModule) -> GraphModule:
    """*module* with its Python code, which nobody has needed so far: programs run flat code."""
    for child in module.modules():
        if isinstance(child, GraphModule):
            if any(is_named(value) for node in child.graph.nodes for value in node.args):
                child.graph.set_codegen(RegionCode(child.graph))
            _LazyGraphModule.force_recompile(child)
    return module


def _graph_module(
    graph: Graph,
    sources: dict[Node, Source],
    root: nn.Module,
    blocks: dict[str, GraphModule] | None = None,
) -> GraphModule:
    """The recorded graph with the model's own tensors as attributes, under their own names."""
    attributes: dict[str, Any] = dict(blocks or {})
    for node, source in sources.items():
        holder, name = _slot(source, root)
        attributes[str(node.target)] = holder[name]
    return _LazyGraphModule(attributes, graph, class_name="AmpGraph")
