"""Movement that takes all of a value goes, where nobody could tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fxamp.capture.symbols import Sizes
from fxamp.ir.text import show
from fxamp.passes.clean_up import Level
from fxamp.passes.fold_noop_movement import FoldNoopMovement
from fxamp.passes.verify import Verify
from tests.passes.checks import captured, check, prepared


@pytest.mark.parametrize(
    ("movement", "line"),
    [
        (lambda h: h[:, :], "%alias: f32[2, 4] = alias(%exp)"),
        (lambda h: h[..., -4:], "%slice_1: f32[2, 4] = slice(%exp, 1, -4, 9223372036854775807)"),
        (lambda h: h.expand(2, -1), "%expand: f32[2, 4] = expand(%exp, [2, -1])"),
        (lambda h: h.detach(), "%detach: f32[2, 4] = detach(%exp)"),
    ],
)
@torch.no_grad()
def test_what_takes_all_goes(movement: Callable[[Tensor], Tensor], line: str) -> None:
    name = line.partition(":")[0]
    check(
        FoldNoopMovement,
        lambda x: movement(x.exp()) * 2,
        torch.ones(2, 4),
        before=f"""
            %x: f32[2, 4] = input
            %exp: f32[2, 4] = exp(%x)
            {line}
            %mul: f32[2, 4] = mul({name}, 2)
            return [%mul]
        """,
        after="""
            %x: f32[2, 4] = input
            %exp: f32[2, 4] = exp(%x)
            %mul: f32[2, 4] = mul(%exp, 2)
            return [%mul]
        """,
    )


def _reshaped(h: Tensor) -> Tensor:
    whole = h[:]
    h.unsqueeze_(0)
    return whole * h


_STAYS: dict[str, Callable[[Tensor], Any]] = {
    "a part": lambda x: x.exp()[:, :3] * 2,
    "every other row, of one": lambda x: x.exp()[:1][::2] * 2,
    "a result": lambda x: x.exp()[:],
    "what is written to, and so given back": lambda x: x.exp()[:].mul_(2),
    "an argument": lambda x: x[:] * 2,
    "one of more dimensions": lambda x: x.exp().expand(1, 2, 4) * 2,
    "where a shape changes in place": lambda x: _reshaped(x.exp()),
}


@pytest.mark.parametrize("function", _STAYS.values(), ids=_STAYS)
@torch.no_grad()
def test_what_could_be_told_apart_stays(function: Callable[[Tensor], Any]) -> None:
    ready = prepared(FoldNoopMovement, function, torch.ones(2, 4))
    before = show(ready.module)
    assert not ready.step(ready.module)
    assert show(ready.module) == before


def test_it_stays_where_a_gradient_is_recorded() -> None:
    x = torch.ones(2, 4, requires_grad=True)
    ready = prepared(FoldNoopMovement, lambda x: x.exp()[:] * 2, x)
    assert not ready.step(ready.module)


@torch.no_grad()
def test_sizes_that_vary_are_the_same_if_their_expressions_are() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        h = x.exp()
        return h[: x.shape[0]].sum() + h[: y.shape[0]].sum()

    graph = captured(function, torch.ones(3, 4), torch.ones(2, 4), sizes=Sizes.ALL).graph
    step = FoldNoopMovement(Level.INFERENCE_EXACT)
    texts = [line for line in show(graph).splitlines() if "slice" in line]
    step.run(graph)
    left = [line for line in show(graph).splitlines() if "= slice" in line]
    assert len(texts) > len(left) == 1


@torch.no_grad()
def test_masks_of_the_full_length_are_one_cast() -> None:
    """A cast before the slice and one behind it are of one value now."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        h = x.exp()
        return h @ w + h[:, :4] @ w

    module = prepared(Verify, function, torch.ones(2, 4), torch.ones(4, 4)).module
    assert [line for line in show(module).splitlines() if "%exp_bf16" in line.partition(":")[0]] == [
        "%exp_bf16: bf16[2, 4] = to(%exp, bf16)"
    ]
