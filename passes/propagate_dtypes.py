"""Give every node its fact, by running operators on fake tensors.

Before: nodes that a front end recorded have facts; others (from a graph that the user brought) may not.
After:  every node has one.  ``facts_on_fakes`` is how the verifier sees what a rewritten graph gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fxamp.ir.blocks import is_opaque_call
from fxamp.ir.facts import Fact, Facts, example_size, fact_of
from fxamp.ir.regions import no_autocast, run_in_region
from fxamp.passes.base import Pass
from fxamp.passes.known_results import Kind, KnownResults, StandIn, facts_of, real

__all__ = ["PropagateDtypes", "facts_on_fakes", "fresh_fake", "run_on_fakes"]

_NEEDS_SYMBOLS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


@dataclass(frozen=True)
class PropagateDtypes(Pass):
    """Every node has a fact.

    Attributes:
        fakes: The mode of the fake tensors in the graph.
    """

    name: ClassVar[str] = "propagate-dtypes"
    fakes: FakeTensorMode

    def run(self, graph: Graph) -> bool:
        missing = [node for node in graph.nodes if "fact" not in node.meta and node.op != "output"]
        if not missing:
            return False

        def note(node: Node, value: object) -> None:
            if "fact" not in node.meta:
                node.meta["fact"] = fact_of(value)
                node.meta.setdefault("val", value)

        run_on_fakes(graph, self.fakes, note)
        return True


def run_on_fakes(graph: Graph, fakes: FakeTensorMode, see: Callable[[Node, object], None]) -> None:
    """Run *graph* with autocast off on fresh fake inputs and call ``see(node, value)`` on each result.

    The fakes have the sizes of the example, which is many times faster than symbolic sizes and gives the
    same dtypes; a graph whose sizes depend on data is run symbolically.
    """
    try:
        _run(graph, FakeTensorMode(allow_non_fake_inputs=True), see, _sized_value)
    except _NEEDS_SYMBOLS:
        _run(graph, fakes, see, _symbolic_value)


def facts_on_fakes(graph: Graph, fakes: FakeTensorMode, see: Callable[[Node, Facts], None]) -> None:
    """Call ``see(node, facts)`` on what :func:`run_on_fakes` would see; repeated calls are not run again."""
    known = KnownResults(graph)

    def note(node: Node, value: object) -> None:
        see(node, facts_of(value))

    def value_of(node: Node, values: dict[Node, Any]) -> object:
        if node.op in ("placeholder", "get_attr"):
            return _sized_stand_in(node)
        if node.target is run_in_region or _is_opaque(node):
            return _sized_value(node, {used: real(values[used]) for used in node.all_input_nodes})
        args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
        assert callable(node.target)
        return known.call(node.target, args, kwargs)

    try:
        _run(graph, FakeTensorMode(allow_non_fake_inputs=True), note, value_of)
    except _NEEDS_SYMBOLS:
        _run(graph, fakes, note, _symbolic_value)


def _run(
    graph: Graph,
    mode: FakeTensorMode,
    see: Callable[[Node, object], None],
    value_of: Callable[[Node, dict[Node, Any]], object],
) -> None:
    values: dict[Node, Any] = {}
    grad = torch.is_grad_enabled()
    try:
        with no_autocast(), mode, enable_python_dispatcher():
            for node in graph.nodes:
                if node.op == "output":
                    return
                values[node] = value_of(node, values)
                see(node, values[node])
    finally:
        torch.set_grad_enabled(grad)


def _sized_value(node: Node, values: dict[Node, Any]) -> object:
    return _value(node, values, sized=True)


def _symbolic_value(node: Node, values: dict[Node, Any]) -> object:
    return _value(node, values, sized=False)


def _value(node: Node, values: dict[Node, Any], *, sized: bool) -> object:
    if node.op in ("placeholder", "get_attr"):
        return fresh_fake(node, sized=sized)
    if _is_opaque(node):
        return _fresh_results(node.meta["val"], sized=sized)
    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
    assert callable(node.target)
    value = node.target(*args, **kwargs)
    if node.target is run_in_region:  # a fake tensor has no kernel to ask; it was asked at capture
        return _as_recorded(value, node.meta["fact"])
    return value


def _is_opaque(node: Node) -> bool:
    """Whether the results of *node* are known from the recording alone."""
    return is_opaque_call(node) or "whole" in node.meta


def _as_recorded(value: Any, fact: object) -> Any:
    if isinstance(value, torch.Tensor) and isinstance(fact, Fact):
        return value.to(fact.dtype)
    if isinstance(value, (list, tuple)) and isinstance(fact, tuple):
        return [_as_recorded(item, part) for item, part in zip(value, fact, strict=True)]
    return value


def fresh_fake(node: Node, *, sized: bool) -> object:
    """A new fake tensor like the one that *node* stood for when it was captured.

    Args:
        node: An input or a source.
        sized: Whether it has the sizes of the example (in the fake mode that is active), or symbolic ones.
    """
    value, fact = node.meta.get("val", node.meta.get("number")), node.meta["fact"]
    if not isinstance(value, torch.Tensor) or not isinstance(fact, Fact):
        return value
    return _like(value, requires_grad=fact.requires_grad, leaf=fact.leaf, sized=sized)


def _like(value: torch.Tensor, *, requires_grad: bool, leaf: bool, sized: bool) -> torch.Tensor:
    """A new fake tensor with the layout of *value*, at that place in the gradient."""
    fake = _of_example_size(value) if sized else value.detach()
    if not requires_grad:
        return fake
    fake.requires_grad_()
    if leaf:
        return fake
    with torch.enable_grad():
        return fake.clone()


def _fresh_results(value: Any, *, sized: bool) -> Any:
    if isinstance(value, (list, tuple)):
        return [_fresh_results(item, sized=sized) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    return _like(value, requires_grad=value.requires_grad, leaf=False, sized=sized)


def _sized_stand_in(node: Node) -> object:
    """What :func:`fresh_fake` makes, made when it is needed."""
    value, fact = node.meta.get("val"), node.meta["fact"]
    if not isinstance(value, torch.Tensor) or not isinstance(fact, Fact):
        return fresh_fake(node, sized=True)
    shape, strides = _example_layout(value)
    kind = Kind(value.dtype, value.device, shape, strides, 0, fact.requires_grad)
    return StandIn(
        kind, replace(fact, dtype=value.dtype), lambda: cast("torch.Tensor", fresh_fake(node, sized=True))
    )


def _of_example_size(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(*_example_layout(value), dtype=value.dtype, device=value.device)


def _example_layout(value: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides in the example."""
    if value.layout is not torch.strided:
        raise DynamicOutputShapeException(None)  # type: ignore[arg-type]
    return tuple(map(_hint, value.shape)), tuple(map(_hint, value.stride()))


def _hint(number: int | torch.SymInt) -> int:
    size = example_size(number)
    if size is None:
        raise DynamicOutputShapeException(None)  # type: ignore[arg-type]
    return size
