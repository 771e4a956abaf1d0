"""Casts of casts are folded where the middle loses nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from fxamp.ir.text import show
from fxamp.passes.fold_cast_chains import FoldCastChains
from fxamp.passes.verify import Verify
from tests.passes.checks import check, prepared

HALF = torch.ones(4, dtype=torch.bfloat16)


def test_a_round_trip_through_a_wider_dtype_gives_the_value_back() -> None:
    check(
        FoldCastChains,
        lambda x: x.float().bfloat16() * 2,
        HALF,
        before="""
            %x: bf16[4] = input
            %to: f32[4] = to(%x, f32)
            %to_1: bf16[4] = to(%to, bf16)
            %mul: bf16[4] = mul(%to_1, 2)
            return [%mul]
        """,
        after="""
            %x: bf16[4] = input
            %mul: bf16[4] = mul(%x, 2)
            return [%mul]
        """,
    )


def test_two_steps_up_are_one() -> None:
    check(
        FoldCastChains,
        lambda x: x.float().double() * 2,
        HALF,
        before="""
            %x: bf16[4] = input
            %to: f32[4] = to(%x, f32)
            %to_1: f64[4] = to(%to, f64)
            %mul: f64[4] = mul(%to_1, 2)
            return [%mul]
        """,
        after="""
            %x: bf16[4] = input
            %to_1: f64[4] = to(%x, f64)
            %mul: f64[4] = mul(%to_1, 2)
            return [%mul]
        """,
    )


def test_a_trip_through_the_other_half_and_one_through_a_narrower_dtype_stay() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        return x.half().bfloat16() * y.bfloat16().float()

    text = """
        %x: bf16[4] = input
        %y: f32[4] = input
        %to: f16[4] = to(%x, f16)
        %to_1: bf16[4] = to(%to, bf16)
        %to_2: bf16[4] = to(%y, bf16)
        %to_3: f32[4] = to(%to_2, f32)
        %mul: f32[4] = mul(%to_1, %to_3)
        return [%mul]
    """
    check(FoldCastChains, program, HALF, torch.ones(4), before=text, after=text)


def test_a_round_trip_that_is_returned_or_written_to_stays_a_tensor_of_its_own() -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.float().bfloat16(), x.float().bfloat16().mul_(2)

    text = """
        %x: bf16[4] = input
        %to: f32[4] = to(%x, f32)
        %to_1: bf16[4] = to(%to, bf16)
        %to_2: f32[4] = to(%x, f32)
        %to_3: bf16[4] = to(%to_2, bf16)
        %mul_: bf16[4] = mul_(%to_3, 2)
        return [%to_1, %mul_]
    """
    check(FoldCastChains, program, HALF, before=text, after=text)


def test_with_a_gradient_a_chain_is_folded_only_if_nothing_else_is_added_to_it() -> None:
    def shared(x: Tensor) -> Tensor:
        high = x.float()
        return high.bfloat16() * 2 + high

    text = """
        %x: bf16[4] = input
        %to: f32[4] = to(%x, f32)
        %to_1: bf16[4] = to(%to, bf16)
        %mul: bf16[4] = mul(%to_1, 2)
        %add: f32[4] = add(%mul, %to)
        return [%add]
    """
    leaf = HALF.clone().requires_grad_()
    check(FoldCastChains, shared, leaf, before=text, after=text)
    check(
        FoldCastChains,
        lambda x: x.float().bfloat16() * 2,
        leaf,
        before="""
            %x: bf16[4] = input
            %to: f32[4] = to(%x, f32)
            %to_1: bf16[4] = to(%to, bf16)
            %mul: bf16[4] = mul(%to_1, 2)
            return [%mul]
        """,
        after="""
            %x: bf16[4] = input
            %mul: bf16[4] = mul(%x, 2)
            return [%mul]
        """,
    )


@torch.no_grad()
def test_a_chain_on_slices_is_folded_before_casts_are_placed_apart() -> None:
    """``x[i].float()`` for a linear layer: the pair would be parted by casting all of ``x`` once."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        h = torch.mm(x, w)
        return torch.stack([h[index].float() @ w for index in range(3)])

    module = prepared(Verify, function, torch.ones(3, 4), torch.ones(4, 4)).module
    assert [line for line in show(module).splitlines() if " = to(" in line] == [
        "%w_bf16: bf16[4, 4] = to(%w, bf16)",
        "%x_bf16: bf16[3, 4] = to(%x, bf16)",
    ]
