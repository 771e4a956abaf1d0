"""What nobody reads goes, unless it does more than return a value."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fxamp.ir.regions import Region
from fxamp.passes.remove_dead_code import RemoveDeadCode
from tests.passes.checks import check


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
