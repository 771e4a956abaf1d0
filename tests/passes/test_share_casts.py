"""One cast a value and dtype, where the level and the memory allow it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fxamp.ir.edits import edits_of
from fxamp.passes.share_casts import ShareCasts
from tests.passes.checks import check


def test_the_uses_of_an_activation_share_one_cast_where_no_gradient_is_recorded() -> None:
    def program(x: Tensor) -> Tensor:
        h = x + 1
        return torch.mm(h, h) + torch.mm(h, h)

    ready = check(
        ShareCasts,
        program,
        torch.ones(2, 2),
        before="""
            %x: f32[2, 2] = input
            %add: f32[2, 2] = add(%x, 1)
            %add_bf16: bf16[2, 2] = to(%add, bf16)
            %add_bf16_1: bf16[2, 2] = to(%add, bf16)
            %mm: bf16[2, 2] = mm(%add_bf16_1, %add_bf16)
            %add_bf16_2: bf16[2, 2] = to(%add, bf16)
            %add_bf16_3: bf16[2, 2] = to(%add, bf16)
            %mm_1: bf16[2, 2] = mm(%add_bf16_3, %add_bf16_2)
            %add_1: bf16[2, 2] = add(%mm, %mm_1)
            return [%add_1]
        """,
        after="""
            %x: f32[2, 2] = input
            %add: f32[2, 2] = add(%x, 1)
            %add_bf16: bf16[2, 2] = to(%add, bf16)
            %mm: bf16[2, 2] = mm(%add_bf16, %add_bf16)
            %mm_1: bf16[2, 2] = mm(%add_bf16, %add_bf16)
            %add_1: bf16[2, 2] = add(%mm, %mm_1)
            return [%add_1]
        """,
    )
    first, *_ = edits_of(ready.module)
    assert (first.by, first.level) == ("share-casts", "inference-exact")
    assert (first.node, first.what) == ("add_bf16_1", "shared with %add_bf16")


def test_in_training_each_use_of_an_activation_keeps_its_cast_and_the_data_share_one() -> None:
    model = nn.Linear(2, 2, bias=False)
    text = """
        %x: f32[1, 2] = input
        %weight: f32[2, 2] = weight
        %weight_bf16: bf16[2, 2] = to(%weight, bf16)
        %x_bf16: bf16[1, 2] = to(%x, bf16)
        %linear: bf16[1, 2] = linear(%x_bf16, %weight_bf16)
        %exp: bf16[1, 2] = exp(%linear)
        %to: f32[1, 2] = to(%exp, f32)
        %to_bf16: bf16[1, 2] = to(%to, bf16)
        %linear_1: bf16[1, 2] = linear(%to_bf16, %weight_bf16)
        %to_bf16_1: bf16[1, 2] = to(%to, bf16)
        %linear_2: bf16[1, 2] = linear(%to_bf16_1, %weight_bf16)
        %add: bf16[1, 2] = add(%linear_1, %linear_2)
        {second}%linear_3: bf16[1, 2] = linear({x}, %weight_bf16)
        %add_1: bf16[1, 2] = add(%add, %linear_3)
        return [%add_1]
    """

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = model.weight

        def forward(self, x: Tensor) -> Tensor:
            h = nn.functional.linear(x, self.weight).exp().float()
            first, second = (nn.functional.linear(h, self.weight) for _ in range(2))
            return first + second + nn.functional.linear(x, self.weight)

    again = "%x_bf16_1: bf16[1, 2] = to(%x, bf16)\n        "
    before, after = text.format(second=again, x="%x_bf16_1"), text.format(second="", x="%x_bf16")
    check(ShareCasts, Uses(), torch.ones(1, 2), before=before, after=after)


def test_a_write_in_between_keeps_casts_apart() -> None:
    def program(x: Tensor) -> Tensor:
        h = x + 1
        first = torch.mm(h, x)
        h[0].mul_(2)
        return first + torch.mm(h, x)

    text = """
        %x: f32[2, 2] = input
        %add: f32[2, 2] = add(%x, 1)
        %x_bf16: bf16[2, 2] = to(%x, bf16)
        %add_bf16: bf16[2, 2] = to(%add, bf16)
        %mm: bf16[2, 2] = mm(%add_bf16, %x_bf16)
        %select: f32[2] = select(%add, 0, 0)
        %mul_: f32[2] = mul_(%select, 2)
        {second}%add_bf16_1: bf16[2, 2] = to(%add, bf16)
        %mm_1: bf16[2, 2] = mm(%add_bf16_1, {x})
        %add_1: bf16[2, 2] = add(%mm, %mm_1)
        return [%add_1]
    """
    again = "%x_bf16_1: bf16[2, 2] = to(%x, bf16)\n        "
    before, after = text.format(second=again, x="%x_bf16_1"), text.format(second="", x="%x_bf16")
    check(ShareCasts, program, torch.ones(2, 2), before=before, after=after)


def test_two_casts_that_the_model_returns_stay_two_tensors() -> None:
    def program(x: Tensor) -> list[Tensor]:
        return [x.bfloat16(), x.bfloat16()]

    text = """
        %x: f32[2] = input
        %to: bf16[2] = to(%x, bf16)
        %to_1: bf16[2] = to(%x, bf16)
        return [%to, %to_1]
    """
    check(ShareCasts, program, torch.ones(2), before=text, after=text)
