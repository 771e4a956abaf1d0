"""Every node has its fact; where the front end gave none, it is found on fake tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fxamp.ir.facts import Fact
from fxamp.passes.propagate_dtypes import PropagateDtypes, fresh_fake
from tests.passes.checks import prepared


def _program(x: Tensor, w: Tensor) -> Tensor:
    low, high = torch.mm(x, w).chunk(2)
    return low.float() + high.double()


def test_a_recorded_graph_has_all_facts_already() -> None:
    ready = prepared(PropagateDtypes, _program, torch.ones(4, 4), torch.ones(4, 4))
    assert not ready.step(ready.module)


def test_missing_facts_are_found_by_running_on_fake_tensors() -> None:
    ready = prepared(PropagateDtypes, _program, torch.ones(4, 4), torch.ones(4, 4, requires_grad=True))
    taken = {}
    for node in ready.module.graph.nodes:
        if node.name in ("to", "to_1", "add"):
            taken[node] = node.meta.pop("fact")
            del node.meta["val"]
    assert ready.step(ready.module)
    assert {node: node.meta["fact"] for node in taken} == taken
    assert str(ready.node("add").meta["fact"]) == "f64[2, 4]"
    assert not ready.step(ready.module)


def test_facts_of_several_results_are_a_tuple() -> None:
    ready = prepared(PropagateDtypes, _program, torch.ones(4, 4), torch.ones(4, 4))
    assert [str(fact) for fact in ready.node("chunk").meta["fact"]] == ["bf16[2, 4]", "bf16[2, 4]"]


def test_a_fresh_fake_has_the_place_in_the_gradient_that_was_recorded() -> None:
    model = nn.Linear(4, 4)
    ready = prepared(
        PropagateDtypes, lambda x, y: x + y, torch.ones(4, requires_grad=True), model(torch.ones(4))
    )
    for name in ("x", "y"):
        with ready.captured.fakes:
            fake = fresh_fake(ready.node(name), sized=True)
        fact = ready.node(name).meta["fact"]
        assert isinstance(fake, Tensor)
        assert isinstance(fact, Fact)
        assert (fake.requires_grad, fake.is_leaf) == (fact.requires_grad, fact.leaf) == (True, name == "x")
