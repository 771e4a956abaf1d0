"""Sizes stay symbolic: arithmetic is in the graph, decisions are in the guard."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx import GraphModule

from fxamp.capture.capture import capture
from fxamp.capture.guards import Guard, shape_guard
from fxamp.capture.segments import Captured
from fxamp.capture.structure import flatten
from fxamp.ir.text import show
from tests.passes.checks import BF16


def _captured(function: Callable[..., object], *args: Tensor) -> tuple[Captured, Guard]:
    spec, leaves = flatten((args, {}))
    recorded = capture(function, spec, leaves, BF16)
    assert recorded.fakes.shape_env is not None
    return recorded, shape_guard(recorded.opening, recorded.fakes.shape_env)


def test_a_program_serves_other_sizes() -> None:
    recorded, guard = _captured(lambda x: x * 2, torch.ones(3, 4))
    assert guard.holds([torch.ones(5, 7)])
    assert "[s" in show(recorded.graph)


@pytest.mark.parametrize("shape", [(1, 4), (0, 4)])
def test_sizes_of_0_and_1_are_programs_of_their_own(shape: tuple[int, ...]) -> None:
    _, guard = _captured(lambda x: x * 2, torch.ones(3, 4))
    assert not guard.holds([torch.ones(shape)])
    _, guard = _captured(lambda x: x * 2, torch.ones(shape))
    assert guard.holds([torch.ones(shape)])
    assert not guard.holds([torch.ones(3, 4)])


def test_what_python_decides_on_a_size_is_in_the_guard() -> None:
    def branch(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 4 else x

    _, small = _captured(branch, torch.ones(3))
    _, large = _captured(branch, torch.ones(6))
    assert [small.holds([torch.ones(n)]) for n in (3, 4, 5)] == [True, True, False]
    assert [large.holds([torch.ones(n)]) for n in (3, 4, 5)] == [False, False, True]


def test_a_size_that_python_makes_a_number_of_is_fixed() -> None:
    _, guard = _captured(lambda x: x * int(x.shape[0]), torch.ones(3))
    assert guard.holds([torch.ones(3)])
    assert not guard.holds([torch.ones(4)])


def test_a_loop_over_a_dimension_fixes_it_and_no_other() -> None:
    _, guard = _captured(lambda x: [row * 2 for row in x], torch.ones(3, 4))
    assert guard.holds([torch.ones(3, 5)])
    assert not guard.holds([torch.ones(4, 4)])


def test_sizes_that_an_operator_needs_to_agree_must_agree() -> None:
    _, guard = _captured(torch.mm, torch.ones(2, 3), torch.ones(3, 4))
    assert guard.holds([torch.ones(5, 6), torch.ones(6, 7)])
    assert not guard.holds([torch.ones(5, 6), torch.ones(5, 7)])


def test_sizes_that_are_the_same_by_chance_stay_apart() -> None:
    _, guard = _captured(lambda x, y: (x * 2, y * 2), torch.ones(3), torch.ones(3))
    assert guard.holds([torch.ones(3), torch.ones(4)])


_formulas: tuple[Callable[[Tensor], object], ...] = (
    lambda x: x.new_zeros(x.shape[0] * 2 + 1, x.shape[1] // 2),
    lambda x: x.new_zeros(x.shape[0] % 3 + x.shape[1] - 1),
    lambda x: x.new_zeros(max(x.shape[0], x.shape[1]), min(x.shape[0], 5)),
    lambda x: x * (x.shape[0] / x.shape[1]),
    lambda x: x * x.shape[1] ** 0.5,
    lambda x: x.reshape(-1)[: x.numel() // 2],
    lambda x: x.view(x.shape[1], x.shape[0]) + len(x.shape),
    lambda x: torch.full((x.size(0),), x.shape[0] * x.shape[1] - x.shape[0] ** 2),
    lambda x: torch.arange(x.shape[0], 2 * x.shape[0]),
    lambda x: x.unflatten(0, (1, -1)).expand(x.shape[1], -1, -1),
)


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(_formulas),
    st.tuples(st.integers(2, 9), st.integers(2, 9)),
    st.tuples(st.integers(2, 9), st.integers(2, 9)),
)
def test_size_arithmetic_in_the_graph_is_pythons(
    formula: Callable[[Tensor], Tensor], captured: tuple[int, int], called: tuple[int, int]
) -> None:
    recorded, guard = _captured(formula, torch.ones(captured))
    x = torch.randn(called)
    assert guard.holds([torch.ones(captured)])
    if guard.holds([x]):
        (result,) = GraphModule(torch.nn.Module(), recorded.graph)(x)
        assert torch.equal(result, formula(x))
        assert result.dtype == formula(x).dtype
