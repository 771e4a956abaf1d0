"""A repeated call is answered by a stand-in that is in all respects what the operator would give."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph

from fxamp.ir.facts import fact_of
from fxamp.passes.known_results import KnownResults, StandIn, facts_of, kind_of, real

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _fakes() -> Iterator[None]:
    with FakeTensorMode():
        yield


def _results(*targets: object) -> KnownResults:
    graph = Graph()
    x = graph.placeholder("x")
    for target in targets:
        graph.call_function(target, (x,))  # type: ignore[arg-type]
    return KnownResults(graph)


def test_the_second_call_gives_a_stand_in_of_the_same_kind_and_facts() -> None:
    known = _results()
    x = torch.randn(2, 3, requires_grad=True)
    first = known.call(aten.exp.default, (x,), {})
    second = known.call(aten.exp.default, (torch.randn(2, 3, requires_grad=True),), {})
    assert isinstance(first, torch.Tensor)
    assert isinstance(second, StandIn)
    assert second.made is None
    assert facts_of(second) == fact_of(first) == fact_of(second.tensor())
    assert kind_of(second.tensor()) == kind_of(first)
    assert second.tensor() is second.tensor()


@pytest.mark.parametrize(
    "other",
    [
        lambda: torch.randn(3, 2),
        lambda: torch.randn(3, 2).t(),
        lambda: torch.randn(2, 3, dtype=torch.bfloat16),
        lambda: torch.randn(2, 3, requires_grad=True),
        lambda: torch.randn(12)[6:].view(2, 3),
    ],
)
def test_a_tensor_of_another_kind_is_another_call(other: object) -> None:
    known = _results()
    known.call(aten.exp.default, (torch.randn(2, 3),), {})
    assert isinstance(known.call(aten.exp.default, (other(),), {}), torch.Tensor)  # type: ignore[operator]


def test_so_are_other_arguments_and_another_gradient_mode() -> None:
    known = _results()
    x = torch.randn(2, 3, requires_grad=True)
    known.call(aten.mul.Scalar, (x, 1), {})
    assert isinstance(known.call(aten.mul.Scalar, (x, 1.0), {}), torch.Tensor)
    assert isinstance(known.call(aten.mul.Scalar, (x, True), {}), torch.Tensor)
    with torch.no_grad():
        found = known.call(aten.mul.Scalar, (x, 1), {})
    assert isinstance(found, torch.Tensor)
    assert not found.requires_grad


def test_stand_ins_are_arguments_and_items_of_results() -> None:
    known = _results()
    for x in (torch.randn(4, 4), torch.randn(4, 4)):
        parts = known.call(aten.split.Tensor, (x, 2), {})
        last = known.call(aten.exp.default, (parts[1],), {})
    assert all(isinstance(part, StandIn) and part.made is None for part in (*parts, last))
    assert parts[1].tensor().storage_offset() == 8
    assert facts_of(parts) == (fact_of(torch.randn(2, 4)),) * 2


def test_where_a_graph_writes_to_tensors_what_shares_memory_is_run_each_time() -> None:
    known = _results(aten.mul_.Tensor)
    x, weight = torch.randn(4), torch.randn(4, requires_grad=True)
    known.call(aten.view.default, (torch.randn(4), [2, 2]), {})
    view = known.call(aten.view.default, (x, [2, 2]), {})
    assert isinstance(view, torch.Tensor)
    fresh = [known.call(aten.exp.default, (x,), {}) for _ in range(2)][1]
    assert isinstance(fresh, StandIn)
    row = known.call(aten.select.int, (known.call(aten.view.default, (fresh, [2, 2]), {}), 0, 0), {})
    known.call(aten.mul_.Tensor, (row, weight[:2]), {})
    assert real(fresh).requires_grad
    assert known.call(aten.exp.default, (fresh,), {}).requires_grad
