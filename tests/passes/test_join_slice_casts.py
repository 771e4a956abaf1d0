"""Slices that lie apart are cast together, and each is laid out as its own cast was."""

from __future__ import annotations

import torch
from torch import Tensor

from fxamp.passes.join_slice_casts import JoinSliceCasts
from tests.passes.checks import check, prepared


def test_the_steps_of_a_sequence_are_cast_once_and_laid_out_one_behind_another() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.mm(x[:, 0], x[:, 1])

    check(
        JoinSliceCasts,
        program,
        torch.ones(32, 2, 32),
        before="""
            %x: f32[32, 2, 32] = input
            %select: f32[32, 32] = select(%x, 1, 0)
            %select_1: f32[32, 32] = select(%x, 1, 1)
            %select_1_bf16: bf16[32, 32] = to(%select_1, bf16)
            %select_bf16: bf16[32, 32] = to(%select, bf16)
            %mm: bf16[32, 32] = mm(%select_bf16, %select_1_bf16)
            return [%mm]
        """,
        after="""
            %x: f32[32, 2, 32] = input
            %select: f32[32, 32] = select(%x, 1, 0)
            %select_1: f32[32, 32] = select(%x, 1, 1)
            %movedim_int: f32[2, 32, 32] = movedim(%x, 1, 0)
            %x_bf16: bf16[2, 32, 32] = to(%movedim_int, bf16, False, False, torch.contiguous_format)
            %select_int: bf16[32, 32] = select(%x_bf16, 0, 1)
            %select_int_1: bf16[32, 32] = select(%x_bf16, 0, 0)
            %mm: bf16[32, 32] = mm(%select_int_1, %select_int)
            return [%mm]
        """,
    )


def test_slices_have_the_strides_of_their_own_casts() -> None:
    x = torch.randn(4, 3, 5, 32)
    for dimension in (1, 2):
        joint = x.movedim(dimension, 0).to(torch.bfloat16, memory_format=torch.contiguous_format)
        for index in range(x.shape[dimension]):
            alone = x.select(dimension, index).bfloat16()
            assert joint[index].stride() == alone.stride()
            assert torch.equal(joint[index], alone)


def test_few_slices_of_many_are_cast_one_by_one() -> None:
    ready = prepared(JoinSliceCasts, lambda x: torch.mm(x[:, 0], x[:, 1]), torch.ones(32, 900, 32))
    assert not ready.step(ready.module)


def test_slices_are_cast_one_by_one_where_gradients_flow_or_the_whole_is_laid_out_otherwise() -> None:
    leaf = torch.ones(32, 2, 32).requires_grad_()
    turned = torch.ones(32, 2, 32).transpose(0, 2)
    for x in (leaf, turned):
        ready = prepared(JoinSliceCasts, lambda x: torch.mm(x[:, 0], x[:, 1]), x)
        assert not ready.step(ready.module)
