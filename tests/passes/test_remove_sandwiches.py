"""Operators between two casts work on the low dtype where this machine shows that they round alike."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fxamp.passes.check_sandwiches import check_sandwiches
from fxamp.passes.remove_sandwiches import RemoveSandwiches
from fxamp.passes.sandwich_table import Call, is_exact, is_exact_on_device, rows
from tests.passes.checks import check

CPU = torch.device("cpu")
HALF = torch.ones(4, dtype=torch.bfloat16)


def test_a_sandwich_goes_where_the_operator_rounds_as_the_casts_do() -> None:
    def program(x: Tensor) -> Tensor:
        return F.silu(x.float()).bfloat16() * 2

    assert is_exact_on_device(Call(torch.ops.aten.silu.default), torch.bfloat16, CPU)
    check(
        RemoveSandwiches,
        program,
        HALF,
        before="""
            %x: bf16[4] = input
            %to: f32[4] = to(%x, f32)
            %silu: f32[4] = silu(%to)
            %to_1: bf16[4] = to(%silu, bf16)
            %mul: bf16[4] = mul(%to_1, 2)
            return [%mul]
        """,
        after="""
            %x: bf16[4] = input
            %silu_1: bf16[4] = silu(%x)
            %mul: bf16[4] = mul(%silu_1, 2)
            return [%mul]
        """,
    )


def test_a_sandwich_stays_where_the_operator_rounds_otherwise() -> None:
    def program(x: Tensor) -> Tensor:
        return (x.float() + 0.1).bfloat16() * 2

    text = """
        %x: bf16[4] = input
        %to: f32[4] = to(%x, f32)
        %add: f32[4] = add(%to, 0.1)
        %to_1: bf16[4] = to(%add, bf16)
        %mul: bf16[4] = mul(%to_1, 2)
        return [%mul]
    """
    check(RemoveSandwiches, program, HALF, before=text, after=text)


def test_a_sandwich_stays_where_a_gradient_goes_through_it_or_its_filling_is_read() -> None:
    def program(x: Tensor) -> Tensor:
        high = F.silu(x.float())
        return high.bfloat16() * high

    text = """
        %x: bf16[4] = input
        %to: f32[4] = to(%x, f32)
        %silu: f32[4] = silu(%to)
        %to_1: bf16[4] = to(%silu, bf16)
        %mul: f32[4] = mul(%to_1, %silu)
        return [%mul]
    """
    check(RemoveSandwiches, program, HALF, before=text, after=text)
    text = """
        %x: bf16[4] = input
        %to: f32[4] = to(%x, f32)
        %silu: f32[4] = silu(%to)
        %to_1: bf16[4] = to(%silu, bf16)
        %mul: bf16[4] = mul(%to_1, 2)
        return [%mul]
    """
    leaf = HALF.clone().requires_grad_()
    check(RemoveSandwiches, lambda x: F.silu(x.float()).bfloat16() * 2, leaf, before=text, after=text)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("call", list(rows()), ids=str)
def test_a_row_that_is_called_exact_is_exact_for_values_at_any_place(call: Call, low: torch.dtype) -> None:
    """Another draw than the check's own: random values in tensors of odd sizes and strides."""
    if not is_exact_on_device(call, low, CPU):
        return
    random = torch.Generator().manual_seed(0)
    for shape in ((7,), (1031,), (33, 65), (2, 3, 5, 7)):
        bits = torch.randint(-(2**15), 2**15, shape, generator=random, dtype=torch.int32)
        for x in (bits.to(torch.int16).view(low), bits.to(torch.int16).view(low).transpose(0, -1)):
            one, other = call(x), call(x.float()).to(low)
            assert bool(
                ((one == other) & (one.signbit() == other.signbit()) | (one.isnan() & other.isnan())).all()
            )


def test_the_check_finds_an_operator_that_rounds_otherwise() -> None:
    assert not is_exact(Call(torch.ops.aten.add.Tensor, (0.1,)), torch.bfloat16, CPU)


def test_a_device_that_is_not_there_is_not_relied_on() -> None:
    assert not is_exact_on_device(Call(torch.ops.aten.relu.default), torch.bfloat16, torch.device("hpu"))


def test_the_command_lists_every_row() -> None:
    assert check_sandwiches(CPU).row_count == len(list(rows()))
