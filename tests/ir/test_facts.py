"""What is known of a value: its dtype, its sizes, its place in the gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxamp.capture.symbols import fake_input
from fxamp.ir.facts import Fact, fact_of, fact_of_node, is_cacheable_leaf, size_of

WEIGHT = nn.Parameter(torch.ones(2, 3))


def test_a_fact_prints_as_its_dtype_and_shape() -> None:
    assert str(fact_of(torch.ones(2, 3, dtype=torch.bfloat16))) == "bf16[2, 3]"
    assert str(fact_of(torch.ones((), dtype=torch.bool))) == "b8[]"


def test_several_tensors_have_several_facts_and_other_values_have_none() -> None:
    facts = fact_of([torch.ones(1), (torch.ones(2), None)])
    assert isinstance(facts, tuple)
    assert str(facts[0]) == "f32[1]"
    assert facts[1] == (fact_of(torch.ones(2)), None)
    assert fact_of(3) is None
    assert fact_of_node(3) is None


def test_the_fact_of_a_node_is_one_tensors_or_none() -> None:
    node = Graph().placeholder("x")
    assert fact_of_node(node) is None
    node.meta["fact"] = fact_of(WEIGHT)
    assert fact_of_node(node) == fact_of(WEIGHT)
    node.meta["fact"] = (fact_of(WEIGHT),)
    assert fact_of_node(node) is None


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (WEIGHT, True),
        (torch.ones(2, requires_grad=True), True),
        (torch.ones(2), False),
        (WEIGHT * 1, False),
        (WEIGHT.t(), False),
        (WEIGHT.detach()[0].requires_grad_(), False),
    ],
    ids=["parameter", "leaf", "no gradient", "activation", "view of a leaf", "leaf that is a view"],
)
def test_eager_keeps_casts_of_leaves_that_are_no_views(tensor: Tensor, expected: bool) -> None:
    assert is_cacheable_leaf(tensor) == expected


def test_in_inference_mode_nothing_takes_part_in_the_gradient() -> None:
    with torch.inference_mode():
        fact = fact_of(WEIGHT)
    assert isinstance(fact, Fact)
    assert not fact.requires_grad
    assert not fact.leaf


@pytest.mark.parametrize("grad", [True, False])
def test_a_cast_is_no_leaf_and_has_a_gradient_only_where_one_is_recorded(grad: bool) -> None:
    fact = fact_of(WEIGHT)
    assert isinstance(fact, Fact)
    cast = fact.cast_to(torch.float16, grad=grad)
    assert (cast.dtype, cast.shape, cast.leaf, cast.requires_grad) == (torch.float16, (2, 3), False, grad)


def test_symbolic_sizes_are_expressions() -> None:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake = fake_input(mode, torch.ones(5, 4), [True, False])
    symbol = size_of(fake.shape[0])
    assert size_of(fake.shape[0] * 2) == 2 * symbol
    assert size_of(fake.shape[1]) == 4
    assert str(fact_of(fake)) == f"f32[{symbol}, 4]"
