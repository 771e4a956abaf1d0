"""From a captured segment to a program: rewritten by the passes, folded where weights are frozen, lowered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule

from fxamp.capture.capture import plain_saved_tensors
from fxamp.capture.guards import shape_guard
from fxamp.capture.segments import Captured, Number, Origin, Outer
from fxamp.capture.sources import Constant, Place, Source
from fxamp.capture.symbols import Sizes
from fxamp.ir.blocks import Checkpointed, is_source
from fxamp.ir.cost import note_sizes
from fxamp.passes import build_pipeline, run_passes
from fxamp.passes.base import graphs_of
from fxamp.policy import Policy
from fxamp.runtime.attribute_watch import AttributeWatch
from fxamp.runtime.cast_history import CastLog
from fxamp.runtime.cast_scope import keep_cast as keep
from fxamp.runtime.frozen_weights import FrozenWeights
from fxamp.runtime.lower import lower
from fxamp.runtime.program import Inputs, Operator, Program
from fxamp.runtime.undo import written
from fxamp.runtime.watch import Slot, TensorWatch

__all__ = ["build_program", "graph_module"]


def build_program(
    captured: Captured,
    function: Callable[..., object] | nn.Module,
    policy: Policy,
    sizes: Sizes,
    keep_cast: Callable[..., torch.Tensor] | None = None,
    weights: FrozenWeights | None = None,
    *,
    alone: bool = True,
) -> Program:
    """Rewrite *captured* under *policy* and lower it.

    Args:
        captured: One segment of a call.
        function: What was called, a module or a plain function.
        policy: Which operators are cast.
        sizes: Which sizes were symbolic.
        keep_cast: See :func:`~fxamp.runtime.lower.lower`.
        weights: Those of a frozen module, which are not cast.
        alone: Whether the segment is all of its call; else it may take what it is given for its own.

    Raises:
        FrozenError: The program needs float32 values that the frozen module does not have.
        CaptureError: The graph has another gradient history than the model.
        PolicyError: The policy is not torch's own, and the model sees the difference.
        InvariantError: A pass is at fault.
    """
    root = function if isinstance(function, nn.Module) else nn.Module()
    graph = _rewritten(captured, root, policy, weights)
    module, sources = graph.module, graph.sources
    slots = _slots(module.graph, sources, root)
    keeps = keep if captured.blocks else keep_cast
    code = lower(module.graph, keeps, consumes=not alone)
    packed = None if weights is None else weights.packed_code(module.graph, sources, keeps, code)
    operator = _operator(captured, root)
    watch = TensorWatch(slots, root) if weights is None else weights.watch(module.graph, sources, slots, root)
    _finish(module, captured)
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
        written=_positions(module.graph, graph.written),
        _watch=watch,
        _attributes=AttributeWatch(captured.reads, [*graph.own, *slots]),
        _write_back=tuple((place.slot(root), place.name) for place in captured.rebound),
        _single=captured.result == ("leaf",) and not captured.rebound,
        scoped=bool(captured.blocks),
        casts=graph.casts.history(),
        training=root.training if root is function else False,
        grad=captured.grad,
    )


@dataclass(frozen=True)
class _Rewritten:
    """A graph behind all passes.

    Attributes:
        module: The graph.
        sources: What its ``get_attr`` nodes stand for.
        own: Where the tensors of the model itself are, those before any was folded.
        written: The targets of the inputs and sources that the call may write to.
        casts: What the passes did to casts.
    """

    module: GraphModule
    sources: dict[Node, Source]
    own: list[Slot]
    written: set[object]
    casts: CastLog


def _rewritten(
    captured: Captured, root: nn.Module, policy: Policy, weights: FrozenWeights | None
) -> _Rewritten:
    module = graph_module(captured.graph, captured.sources, root, captured.blocks)
    names: set[object] = set()
    if captured.operator or weights is not None:
        names = {node.target for node in written(captured.graph)}
    casts = CastLog()
    with plain_saved_tensors(), torch._C.DisableTorchFunction():  # no default device of the user's, say
        run_passes(module, build_pipeline(captured, policy), casts)
    own = _slots(module.graph, captured.sources, root)
    if weights is None:
        return _Rewritten(module, captured.sources, own, names, casts)
    rebound = set(captured.rebound)
    changed = {n.target for n, place in captured.sources.items() if place in rebound and _is_buffer(place)}
    sources = weights.fold(module, captured.sources, root, names | changed, casts)
    folded = graph_module(module.graph, sources, root, captured.blocks)
    folded.meta.update(module.meta)
    folded.graph.lint()
    return _Rewritten(folded, sources, own, names, casts)


def _is_buffer(source: Source) -> bool:
    return isinstance(source, Place) and source.kind != "_parameters"


def _finish(module: GraphModule, captured: Captured) -> None:
    module.meta["sizes"] = dict(captured.env.replacements)
    _forget_fakes(module)
    module.recompile()


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
    module = graph_module(recording.graph, recording.sources, root)
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


def graph_module(
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
