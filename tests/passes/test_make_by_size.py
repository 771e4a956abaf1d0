"""A tensor of known size is made by its size, not like another one."""

from __future__ import annotations

from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import Tensor

from fxamp.capture.symbols import Sizes
from fxamp.ir.text import show
from fxamp.passes.make_by_size import MakeBySize
from fxamp.passes.verify import Verify
from tests.passes.checks import captured, prepared


def _check(function: Any, x: Tensor, before: str, after: str) -> None:
    with torch.no_grad():
        module = prepared(Verify, function, x).module
    assert show(module.graph) == dedent(before).strip(), show(module.graph)
    (expected,) = module(x)
    step = MakeBySize()
    assert step.run(module.graph) is (before != after)
    module.graph.lint()
    assert show(module.graph) == dedent(after).strip(), show(module.graph)
    assert not step.run(module.graph)
    module.recompile()
    (found,) = module(x)
    assert torch.equal(found, expected)
    assert (found.dtype, found.stride(), found.device) == (expected.dtype, expected.stride(), expected.device)


@pytest.mark.parametrize(
    ("call", "text", "by_size"),
    [
        (lambda x: x.new_zeros(2, 3), "new_zeros(%x, [2, 3], pin_memory=False)", "zeros([2, 3],"),
        (lambda x: x.new_ones(3), "new_ones(%x, [3], pin_memory=False)", "ones([3],"),
        (lambda x: x.new_full((3,), 2.5), "new_full(%x, [3], 2.5, pin_memory=False)", "full([3], 2.5,"),
        (lambda x: torch.zeros_like(x), "zeros_like(%x, pin_memory=False)", "zeros([4, 4],"),  # noqa: PLW0108  it names x
        (lambda x: torch.ones_like(x), "ones_like(%x, pin_memory=False)", "ones([4, 4],"),  # noqa: PLW0108  it names x
        (lambda x: torch.full_like(x, 3), "full_like(%x, 3, pin_memory=False)", "full([4, 4], 3,"),
    ],
)
def test_only_the_size_is_read(call: Any, text: str, by_size: str) -> None:
    name, size = text.partition("(")[0], by_size.partition("[")[2].partition("]")[0]
    _check(
        call,
        torch.ones(4, 4),
        f"""
        %x: f32[4, 4] = input
        %{name}: f32[{size}] = {text}
        return [%{name}]
        """,
        f"""
        %x: f32[4, 4] = input
        %{name}: f32[{size}] = {by_size} dtype=f32, device=device(type='cpu'), pin_memory=False)
        return [%{name}]
        """,
    )


def test_a_dtype_that_is_asked_for_is_kept() -> None:
    _check(
        lambda x: torch.zeros_like(x, dtype=torch.int64),
        torch.ones(4, 4),
        """
        %x: f32[4, 4] = input
        %zeros_like: i64[4, 4] = zeros_like(%x, dtype=i64, pin_memory=False)
        return [%zeros_like]
        """,
        """
        %x: f32[4, 4] = input
        %zeros_like: i64[4, 4] = zeros([4, 4], dtype=i64, device=device(type='cpu'), pin_memory=False)
        return [%zeros_like]
        """,
    )


def test_other_strides_stay() -> None:
    text = """
        %x: f32[4, 4] = input
        %t: f32[4, 4] = t(%x)
        %zeros_like: f32[4, 4] = zeros_like(%t, pin_memory=False)
        return [%zeros_like]
        """
    _check(lambda x: torch.zeros_like(x.t()), torch.ones(4, 4), text, text)


def test_a_size_that_varies_stays() -> None:
    graph = captured(torch.zeros_like, torch.ones(4, 4), sizes=Sizes.LEADING).graph
    before = show(graph)
    assert not MakeBySize().run(graph)
    assert show(graph) == before
