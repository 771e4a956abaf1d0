"""Questions about operators."""

from __future__ import annotations

import math
import operator

import pytest
import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from fxamp.ir.operators import (
    arguments_in_order,
    is_composite,
    is_impure,
    is_inplace,
    is_to_dtype,
    operator_name,
    set_argument,
    tensor_arguments,
)

aten = torch.ops.aten


def _call(target: object, *args: object, **kwargs: object) -> Node:
    graph = Graph()
    assert callable(target)
    return graph.call_function(target, args, kwargs)  # type: ignore[arg-type]


def test_an_operator_is_named_with_its_overload_and_a_function_by_its_name() -> None:
    assert operator_name(aten.conv2d.padding) == "aten::conv2d.padding"
    assert operator_name(aten.mm.default) == "aten::mm"
    assert operator_name(operator.getitem) == "getitem"


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (aten.einsum.default, True),
        (aten.cross_entropy_loss.default, True),
        (aten.lstm.input, True),
        (aten.mm.default, False),
        (aten.relu.default, False),
        (aten.silu.default, False),
    ],
)
def test_a_composite_is_written_in_other_operators(target: OpOverload, expected: bool) -> None:
    assert is_composite(target) == expected


@pytest.mark.parametrize(
    ("target", "expected"),
    [(aten.add_.Tensor, True), (aten.mm.out, True), (aten.add.Tensor, False), (aten.view.default, False)],
)
def test_an_operator_is_in_place_if_its_schema_says_that_it_writes(
    target: OpOverload,
    expected: bool,
) -> None:
    assert is_inplace(target) == expected


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (aten.add_.Tensor, True),
        (aten.dropout.default, True),
        (aten.rand.default, True),
        (aten.batch_norm.default, True),
        (aten.instance_norm.default, True),
        (torch._C._set_grad_enabled, True),
        (aten.mm.default, False),
        (operator.getitem, False),
        (operator.mul, False),
        (math.sqrt, False),
        (torch.sym_max, False),
    ],
)
def test_what_does_more_than_return_a_value_is_impure(target: object, expected: bool) -> None:
    assert is_impure(_call(target)) == expected


def test_inputs_and_outputs_are_impure_and_sources_are_not() -> None:
    graph = Graph()
    assert is_impure(graph.placeholder("x"))
    assert not is_impure(graph.get_attr("weight"))
    assert is_impure(graph.output(()))


def test_arguments_come_in_the_order_of_the_schema() -> None:
    node = _call(aten.addmm.default, 1, 2, 3, alpha=5, beta=4)
    assert [(argument.name, value) for argument, value in arguments_in_order(node)] == [
        ("self", 1),
        ("mat1", 2),
        ("mat2", 3),
        ("beta", 4),
        ("alpha", 5),
    ]


def test_tensor_arguments_are_tensors_lists_and_if_wanted_optional_ones() -> None:
    node = _call(aten.linear.default, "x", "weight", "bias")
    assert list(tensor_arguments(node)) == ["x", "weight", "bias"]
    assert list(tensor_arguments(node, optional=False)) == ["x", "weight"]
    assert list(tensor_arguments(_call(aten.cat.default, ["x", "y"], 0))) == [["x", "y"]]
    assert list(tensor_arguments(_call(aten.index.Tensor, "x", ["index"]))) == ["x"]


def test_an_argument_is_set_where_the_schema_has_it() -> None:
    node = _call(aten.softmax.int, "x", 1)
    set_argument(node, "dtype", torch.float32)
    assert node.kwargs == {"dtype": torch.float32}
    node = _call(aten.softmax.int, "x", 1, None)
    set_argument(node, "dtype", torch.float32)
    assert node.args == ("x", 1, torch.float32)


def test_only_a_cast_to_a_dtype_is_one() -> None:
    assert is_to_dtype(_call(aten.to.dtype, "x", torch.float32))
    assert not is_to_dtype(_call(aten.to.device, "x", "cpu", torch.float32))
    assert not is_to_dtype(_call(aten._to_copy.default, "x", dtype=torch.float32))
