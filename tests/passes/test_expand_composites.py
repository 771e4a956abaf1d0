"""Composites are opened where they hide an operator that autocast would cast for, and only there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.fx import Node

import fxamp
from fxamp.ir.regions import Region
from fxamp.ir.text import show
from fxamp.passes import expand_composites
from fxamp.passes.expand_composites import ExpandComposites
from tests.passes.checks import BF16, check, prepared


def test_a_composite_that_hides_a_matrix_product_is_opened() -> None:
    check(
        ExpandComposites,
        lambda x, y: torch.tensordot(x, y, dims=([1], [0])),
        torch.ones(2, 4),
        torch.ones(4, 3),
        before="""
            %x: f32[2, 4] = input
            %y: f32[4, 3] = input
            %tensordot: bf16[2, 3] = tensordot(%x, %y, [1], [0])
            return [%tensordot]
        """,
        after="""
            %x: f32[2, 4] = input
            %y: f32[4, 3] = input
            %permute: f32[2, 4] = permute(%x, [0, 1])
            %reshape: f32[2, 4] = reshape(%permute, [2, 4])
            %permute_1: f32[4, 3] = permute(%y, [0, 1])
            %reshape_1: f32[4, 3] = reshape(%permute_1, [4, 3])
            %mm: bf16[2, 3] = mm(%reshape, %reshape_1)
            %reshape_2: bf16[2, 3] = reshape(%mm, [2, 3])
            return [%reshape_2]
        """,
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.dropout(x, 0.5),
        lambda x: F.conv1d(x.unsqueeze(1), torch.ones(1, 1, 3), padding="same"),  # has a rule of its own
        lambda x: x.reshape(8),
        lambda x: F.layer_norm(x, (4,)),
    ],
)
def test_a_composite_that_autocast_does_not_reach_into_stays_whole(function: object) -> None:
    assert callable(function)
    ready = prepared(ExpandComposites, function, torch.ones(2, 4))
    before = show(ready.module)
    assert not ready.step(ready.module)
    assert show(ready.module) == before


def test_a_composite_inside_a_composite_is_opened_too() -> None:
    check(
        ExpandComposites,
        lambda x, y: torch.column_stack([x, y]),
        torch.ones(2, 4),
        torch.ones(2, 4, dtype=torch.bfloat16),
        before="""
            %x: f32[2, 4] = input
            %y: bf16[2, 4] = input
            %column_stack: f32[2, 8] = column_stack([%x, %y])
            return [%column_stack]
        """,
        after="""
            %x: f32[2, 4] = input
            %y: bf16[2, 4] = input
            %atleast_1d: (f32[2, 4], bf16[2, 4]) = atleast_1d([%x, %y])
            %getitem: f32[2, 4] = getitem(%atleast_1d, 0)
            %getitem_1: bf16[2, 4] = getitem(%atleast_1d, 1)
            %cat: f32[2, 8] = cat([%x, %y], 1)
            return [%cat]
        """,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_a_composite_whose_tensors_autocast_never_casts_stays_whole(dtype: torch.dtype) -> None:
    x = torch.ones(2, 2, dtype=dtype)
    ready = prepared(ExpandComposites, lambda x: torch.tensordot(x, x, dims=([1], [0])), x)
    assert not ready.step(ready.module)


def test_in_a_region_that_is_off_nothing_is_opened() -> None:
    off = Region("cpu", enabled=False, dtype=torch.bfloat16)
    ready = prepared(
        ExpandComposites, lambda x: torch.einsum("ij,kj->ik", x, x), torch.ones(2, 4), region=off
    )
    assert not ready.step(ready.module)


def test_the_opened_body_keeps_the_source_line_and_says_what_it_was() -> None:
    ready = prepared(ExpandComposites, lambda x: torch.einsum("ij,kj->ik", x, x), torch.ones(2, 4))
    ready.step(ready.module)
    bmm = next(node for node in ready.module.graph.nodes if node.target is torch.ops.aten.bmm.default)
    assert bmm.meta["inside"] is torch.ops.aten.einsum.default
    assert "einsum" in bmm.meta["where"].source
    assert bmm.meta["region"] == BF16


class _Alike(nn.Module):
    """The same composite three times; the third joins the results of the others."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        one = torch.einsum("ab,bc->ac", x, y)
        two = torch.einsum("ab,bc->ac", x, y)
        one.mul_(2)
        return torch.einsum("ab,bc->ac", one, two.neg_())


def test_calls_that_are_alike_get_copies_of_one_body(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[object] = []
    record = expand_composites._Body.record

    def counted(node: Node, *args: Any, **kwargs: Any) -> Any:
        bodies.append(node.target)
        return record(node, *args, **kwargs)

    monkeypatch.setattr(expand_composites._Body, "record", counted)
    model, x, y = _Alike(), torch.randn(4, 4), torch.randn(4, 4)
    amp = fxamp.convert(model, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x, y)
    assert torch.equal(amp(x, y), expected)
    assert not torch.equal(expected, torch.zeros(4, 4))
    assert bodies.count(torch.ops.aten.einsum.default) == 2  # of float32 tensors, and of bfloat16 ones
    assert not amp.eager_modules
