"""Casts to the dtype that a value has go; all others stay."""

from __future__ import annotations

import torch
from torch import Tensor

from fxamp.passes.fold_noop_casts import FoldNoopCasts
from tests.passes.checks import check


def test_casts_that_change_nothing_go_and_a_round_trip_through_a_narrower_dtype_stays() -> None:
    def chain(x: Tensor) -> Tensor:
        return x.to(torch.float32).to(torch.float16).to(torch.float32).to(torch.float32)

    check(
        FoldNoopCasts,
        chain,
        torch.ones(4),
        before="""
            %x: f32[4] = input
            %to: f32[4] = to(%x, f32)
            %to_1: f16[4] = to(%x, f16)
            %to_2: f32[4] = to(%to_1, f32)
            %to_3: f32[4] = to(%to_2, f32)
            return [%to_2]
        """,
        after="""
            %x: f32[4] = input
            %to_1: f16[4] = to(%x, f16)
            %to_2: f32[4] = to(%to_1, f32)
            return [%to_2]
        """,
    )


def test_a_cast_that_asks_for_a_copy_or_a_layout_stays() -> None:
    text = """
        %x: f32[1, 2, 3, 4] = input
        %to: f32[1, 2, 3, 4] = to(%x, f32, False, True)
        %to_1: f32[1, 2, 3, 4] = to(%to, f32, False, False, torch.channels_last)
        return [%to_1]
    """

    def copies(x: Tensor) -> Tensor:
        x = x.to(torch.float32, copy=True)
        return x.to(torch.float32, memory_format=torch.channels_last)

    check(FoldNoopCasts, copies, torch.ones(1, 2, 3, 4), before=text, after=text)
