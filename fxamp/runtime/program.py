"""A program: one captured and rewritten call, ready to run, with the conditions under which it is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._C import _DisableAutocast, _is_any_autocast_enabled
from torch.fx import GraphModule

from fxamp.capture.capture import Captured, capture, plain_saved_tensors
from fxamp.capture.sources import Constant, Place
from fxamp.capture.structure import Spec, unflatten
from fxamp.capture.symbols import Guard, Sizes, shape_guard
from fxamp.ir.regions import Region
from fxamp.passes import build_pipeline, run_passes
from fxamp.passes.base import graphs_of
from fxamp.policy import Policy
from fxamp.runtime.attribute_watch import AttributeWatch
from fxamp.runtime.lower import FlatCode, lower
from fxamp.runtime.watch import Slot, TensorWatch

__all__ = ["Program", "build_program"]


@dataclass(frozen=True, eq=False)
class Program:
    """What serves the calls of one signature.

    Attributes:
        module: The rewritten graph; its attributes are the model's own tensors.
        code: The flat code that is run.
        guard: Which sizes it serves.
        result: The structure of the result.
        kept: The tensors, by ``id``, of which one cast is kept for the length of a region.
    """

    module: GraphModule
    code: FlatCode
    guard: Guard
    result: Spec
    kept: frozenset[int]
    _watch: TensorWatch
    _attributes: AttributeWatch
    _write_back: tuple[Slot, ...]
    _single: bool = field(default=False)

    def tensors(self) -> list[torch.Tensor] | None:
        """The parameters, buffers and constants, read now; ``None`` if the model is not as captured."""
        return self._watch.read() if self._attributes.hold() else None

    def difference(self) -> str:
        """What about the model is not as captured, for people; ``""`` if it is."""
        return self._attributes.difference() or self._watch.difference()

    def run(self, leaves: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Any:
        """The result of the call, in the structure that the model gives it."""
        if _is_any_autocast_enabled():
            with _DisableAutocast():
                outputs = self.code.run(leaves, tensors)
        else:
            outputs = self.code.run(leaves, tensors)
        if self._single:
            return outputs[0]
        if self._write_back:
            kept = len(outputs) - len(self._write_back)
            for (slots, name), value in zip(self._write_back, outputs[kept:], strict=True):
                slots[name] = value
        return unflatten(self.result, outputs)


def build_program(
    function: Callable[..., object] | nn.Module,
    spec: Spec,
    leaves: Sequence[torch.Tensor],
    region: Region,
    policy: Policy,
    *,
    sizes: Sizes = Sizes.LEADING,
    dynamic_shapes: object = None,
    keep_cast: Callable[..., torch.Tensor] | None = None,
) -> Program:
    """Capture one call, rewrite it under *policy* and lower it.

    Args:
        function: A module or a plain function.
        spec: The structure of ``(args, kwargs)``.
        leaves: The tensors of the call.
        region: The state of autocast around it.
        policy: Which operators are cast.
        sizes: Which sizes are symbolic where the model allows.
        dynamic_shapes: The user's own choice of them, as for ``torch.export``.
        keep_cast: See :func:`~fxamp.runtime.lower.lower`.

    Raises:
        CaptureError: The call cannot be recorded faithfully.
        PolicyError: Eager autocast refuses an operator.
        InvariantError: A pass is at fault.
    """
    with plain_saved_tensors():
        captured = capture(function, spec, leaves, region, sizes, dynamic_shapes)
        module = _graph_module(captured, function)
        run_passes(module, build_pipeline(captured, policy))
    sources = [captured.sources[node] for node in module.graph.nodes if node.op == "get_attr"]
    root = function if isinstance(function, nn.Module) else nn.Module()
    slots = [_slot(source, root) for source in sources]
    code = lower(module.graph, keep_cast)
    _forget_fakes(module)
    module.recompile()
    return Program(
        module=module,
        code=code,
        guard=shape_guard(captured.inputs, captured.env),
        result=captured.result,
        kept=_kept(captured, module, root),
        _watch=TensorWatch(slots, root),
        _attributes=AttributeWatch(captured.reads, slots),
        _write_back=tuple((place.slot(root), place.name) for place in captured.rebound),
        _single=captured.result == ("leaf",) and not captured.rebound,
    )


def _kept(captured: Captured, module: GraphModule, root: nn.Module) -> frozenset[int]:
    casts = [node.args[0] for node in module.graph.nodes if node.meta.get("kept")]
    slots = [_slot(captured.sources[node], root) for node in casts if node in captured.sources]
    return frozenset(id(holder[name]) for holder, name in slots)


def _forget_fakes(module: GraphModule) -> None:
    """Drop the fake tensors and symbolic numbers that the passes worked on; facts say what is to be known."""
    for graph in graphs_of(module):
        for node in graph.nodes:
            node.meta.pop("val", None)
            node.meta.pop("number", None)


def _slot(source: Place | Constant, root: nn.Module) -> Slot:
    if isinstance(source, Constant):
        return {"constant": source.tensor}, "constant"
    return source.slot(root), source.name


def _graph_module(captured: Captured, function: object) -> GraphModule:
    """The recorded graph with the model's own tensors as attributes, under their own names."""
    root = function if isinstance(function, nn.Module) else nn.Module()
    attributes: dict[str, Any] = {}
    for node, source in captured.sources.items():
        holder, name = _slot(source, root)
        attributes[str(node.target)] = holder[name]
    return GraphModule(attributes, captured.graph, class_name="AmpGraph")
