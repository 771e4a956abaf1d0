"""A cast of a weight becomes a source of its own, behind views too; all other casts stay."""

from __future__ import annotations

from textwrap import dedent

import torch
from torch import Tensor, nn
from torch.nn import functional

from fxamp.ir.text import show
from fxamp.passes.fold_weight_casts import FoldWeightCasts
from fxamp.passes.verify import Verify
from tests.passes.checks import prepared


class _Weights(nn.Module):
    """A weight and a buffer, for the forward of a child class."""

    b: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 4))
        self.register_buffer("b", torch.ones(4, 4))


def _check(model: nn.Module, text: str, *weights: str) -> None:
    ready = prepared(Verify, model, torch.ones(2, 4))
    fold = FoldWeightCasts(frozenset(weights))
    assert fold.run(ready.module.graph)
    assert show(ready.module.graph) == dedent(text).strip()
    assert not fold.run(ready.module.graph)


class Linear(_Weights):
    """Two uses of the weight, one of the buffer."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return functional.linear(functional.linear(x, self.w), self.w) + functional.linear(x, self.b)


def test_all_casts_of_a_weight_are_one_source_and_those_of_other_tensors_stay() -> None:
    _check(
        Linear(),
        """
        %x: f32[2, 4] = input
        %w_low: bf16[4, 4] = w_bf16
        %x_bf16: bf16[2, 4] = to(%x, bf16)
        %linear: bf16[2, 4] = linear(%x_bf16, %w_low)
        %linear_1: bf16[2, 4] = linear(%linear, %w_low)
        %b: f32[4, 4] = b
        %b_bf16: bf16[4, 4] = to(%b, bf16)
        %x_bf16_1: bf16[2, 4] = to(%x, bf16)
        %linear_2: bf16[2, 4] = linear(%x_bf16_1, %b_bf16)
        %add: bf16[2, 4] = add(%linear_1, %linear_2)
        return [%add]
        """,
        "w",
    )


class Both(_Weights):
    """The weight is rounded, and used as it is."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return functional.linear(x, self.w) + self.w.sum()


def test_a_weight_that_is_used_as_it_is_stays_beside_its_copy() -> None:
    _check(
        Both(),
        """
        %x: f32[2, 4] = input
        %w: f32[4, 4] = w
        %w_low: bf16[4, 4] = w_bf16
        %x_bf16: bf16[2, 4] = to(%x, bf16)
        %linear: bf16[2, 4] = linear(%x_bf16, %w_low)
        %sum_1: f32[] = sum(%w)
        %add: bf16[2, 4] = add(%linear, %sum_1)
        return [%add]
        """,
        "w",
    )


class Viewed(_Weights):
    """The weight is turned, cut, and multiplied by."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return x @ self.w.t() + x @ self.w[:, :2].repeat(1, 2)


def test_a_cast_behind_a_view_with_all_elements_is_folded_and_one_behind_a_part_is_not() -> None:
    _check(
        Viewed(),
        """
        %x: f32[2, 4] = input
        %w: f32[4, 4] = w
        %w_low: bf16[4, 4] = w_bf16
        %t_1: bf16[4, 4] = t(%w_low)
        %x_bf16: bf16[2, 4] = to(%x, bf16)
        %matmul: bf16[2, 4] = matmul(%x_bf16, %t_1)
        %slice_1: f32[4, 2] = slice(%w, 1, 0, 2)
        %repeat: f32[4, 4] = repeat(%slice_1, [1, 2])
        %repeat_bf16: bf16[4, 4] = to(%repeat, bf16)
        %x_bf16_1: bf16[2, 4] = to(%x, bf16)
        %matmul_1: bf16[2, 4] = matmul(%x_bf16_1, %repeat_bf16)
        %add: bf16[2, 4] = add(%matmul, %matmul_1)
        return [%add]
        """,
        "w",
    )


class Asked(_Weights):
    """The model rounds the weight by itself."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return functional.linear(x, self.w.to(torch.bfloat16).float())


def test_a_cast_that_the_model_asks_for_stays() -> None:
    ready = prepared(Verify, Asked(), torch.ones(2, 4))
    before = show(ready.module.graph)
    assert not FoldWeightCasts(frozenset({"w"})).run(ready.module.graph)
    assert show(ready.module.graph) == before
