"""What nobody reads goes, unless it does more than return a value."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.fx import Graph

from fxamp.ir.operators import is_impure
from fxamp.ir.regions import Region
from fxamp.passes.remove_dead_code import RemoveDeadCode
from tests.passes.checks import check, prepared


def test_dead_operators_go_with_what_only_they_read() -> None:
    def program(x: Tensor) -> Tensor:
        x.exp().sum()
        return x * 2

    check(
        RemoveDeadCode,
        program,
        torch.ones(4),
        before="""
            %x: f32[4] = input
            %exp: f32[4] = exp(%x)
            %sum_1: f32[] = sum(%exp)
            %mul: f32[4] = mul(%x, 2)
            return [%mul]
        """,
        after="""
            %x: f32[4] = input
            %mul: f32[4] = mul(%x, 2)
            return [%mul]
        """,
    )


def test_dead_random_operators_stay_since_they_move_the_random_state_on() -> None:
    text = """
        %x: f32[4] = input
        %rand_like: f32[4] = rand_like(%x, pin_memory=False)
        %dropout: f32[4] = dropout(%x, 0.5, True)
        return [%x]
    """

    def program(x: Tensor) -> Tensor:
        torch.rand_like(x)
        F.dropout(x)
        return x

    check(RemoveDeadCode, program, torch.ones(4), before=text, after=text)


def test_dropout_that_is_off_gives_its_argument_and_goes() -> None:
    def program(x: Tensor) -> Tensor:
        h = F.dropout(F.alpha_dropout(F.feature_alpha_dropout(x, training=False), training=False), p=0.0)
        return F.dropout(h, training=False) * 2

    module = prepared(RemoveDeadCode, program, torch.ones(1, 4)).module
    dead = {node.name for node in module.graph.nodes if "dropout" in node.name and not node.users}
    assert dead, "what gives its argument back is in the graph, and nothing reads it"
    RemoveDeadCode()(module)
    assert dead.isdisjoint(node.name for node in module.graph.nodes)


@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", ["dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"])
def test_dropout_is_called_pure_where_it_draws_nothing(name: str, train: bool, p: float) -> None:
    x = torch.ones(2, 3, 4, 4)
    function = getattr(torch.ops.aten, name).default
    before = torch.get_rng_state()
    same = function(x, p, train) is x
    draws = not torch.equal(torch.get_rng_state(), before)
    graph = Graph()
    node = graph.call_function(function, (graph.placeholder("x"), p, train))
    assert is_impure(node) == draws == (not same)


def test_writes_and_changes_of_the_gradient_mode_stay() -> None:
    text = """
        %x: f32[4] = input
        _set_grad_enabled(False)
        %mul_: f32[4] = mul_(%x, 2)
        _set_grad_enabled(True)
        return []
    """

    def program(x: Tensor) -> None:
        with torch.no_grad():
            x.mul_(2)

    check(RemoveDeadCode, program, torch.ones(4), before=text, after=text)


def test_a_batch_norm_stays_since_it_writes_to_its_running_statistics() -> None:
    text = """
        %x: f32[2, 4] = input
        %mean: f32[4] = input
        %var: f32[4] = input
        %batch_norm: f32[2, 4] = batch_norm(%x, None, None, %mean, %var, True, 0.1, 1e-05, True)
        return [%x]
    """

    def program(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        F.batch_norm(x, mean, var, training=True)
        return x

    check(RemoveDeadCode, program, torch.ones(2, 4), torch.zeros(4), torch.ones(4), before=text, after=text)


def test_a_dead_operator_of_several_dtypes_stays_since_its_kernel_may_refuse_them() -> None:
    text = """
        %x: f32[2, 2] = input
        %y: f64[2, 2] = input
        %addmm: f64[2, 2] = addmm(%x, %x, %y)
        return [%x]
    """

    def program(x: Tensor, y: Tensor) -> Tensor:
        torch.addmm(x, x, y)
        return x

    x, off = torch.ones(2, 2), Region("cpu", enabled=False, dtype=torch.bfloat16)
    check(RemoveDeadCode, program, x, x.double(), before=text, after=text, region=off)
