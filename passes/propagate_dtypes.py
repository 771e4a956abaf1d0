"""Give every node its fact, by running operators on fake tensors.

Before: nodes that a front end recorded have facts; others (from a graph that the user brought) may not.
After:  every node has one.  ``run_on_fakes`` is also how the verifier sees what a rewritten graph gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

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
from fxamp.ir.facts import Fact, example_size, fact_of
from fxamp.ir.regions import no_autocast, run_in_region
from fxamp.passes.base import Pass

__all__ = ["PropagateDtypes", "fresh_fake", "run_on_fakes"]


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
        _run(graph, FakeTensorMode(allow_non_fake_inputs=True), see, sized=True)
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException):
        _run(graph, fakes, see, sized=False)


def _run(graph: Graph, mode: FakeTensorMode, see: Callable[[Node, object], None], *, sized: bool) -> None:
    values: dict[Node, Any] = {}
    grad = torch.is_grad_enabled()
    try:
        with no_autocast(), mode, enable_python_dispatcher():
            for node in graph.nodes:
                if node.op == "output":
                    return
                values[node] = _value(node, values, sized=sized)
                see(node, values[node])
    finally:
        torch.set_grad_enabled(grad)


def _value(node: Node, values: dict[Node, Any], *, sized: bool) -> object:
    if node.op in ("placeholder", "get_attr"):
        return fresh_fake(node, sized=sized)
    if is_opaque_call(node):
        return _fresh_results(node.meta["val"], sized=sized)
    args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
    assert callable(node.target)
    value = node.target(*args, **kwargs)
    if node.target is run_in_region:  # a fake tensor has no kernel to ask; it was asked at capture
        return _as_recorded(value, node.meta["fact"])
    return value


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
    fake = _of_example_size(value) if sized else value.detach()
    if not fact.requires_grad:
        return fake
    fake.requires_grad_()
    if fact.leaf:
        return fake
    with torch.enable_grad():
        return fake.clone()


def _fresh_results(value: Any, *, sized: bool) -> Any:
    if isinstance(value, (list, tuple)):
        return [_fresh_results(item, sized=sized) for item in value]
    return _fresh_result(value, sized=sized) if isinstance(value, torch.Tensor) else value


def _fresh_result(value: torch.Tensor, *, sized: bool) -> torch.Tensor:
    fake = _of_example_size(value) if sized else value.detach()
    if not value.requires_grad:
        return fake
    with torch.enable_grad():
        return fake.requires_grad_().clone()


def _of_example_size(value: torch.Tensor) -> torch.Tensor:
    if value.layout is not torch.strided:
        raise DynamicOutputShapeException(None)  # type: ignore[arg-type]
    shape, strides = (tuple(map(_hint, numbers)) for numbers in (value.shape, value.stride()))
    return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)


def _hint(number: int | torch.SymInt) -> int:
    size = example_size(number)
    if size is None:
        raise DynamicOutputShapeException(None)  # type: ignore[arg-type]
    return size
