"""The verifier: a planted fault of each kind is reported by the name of the invariant, with its place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from fxamp.errors import CaptureError, InvariantError
from fxamp.ir.operators import TO_DTYPE
from fxamp.ir.regions import enter_region
from fxamp.ir.text import show
from fxamp.passes.verify import Verify
from tests.passes.checks import BF16, Prepared, prepared


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(self.linear(x))


def _verified() -> Prepared:
    return prepared(Verify, _Model(), torch.ones(2, 4))


def test_a_graph_that_is_right_is_left_as_it_is() -> None:
    ready = _verified()
    before = show(ready.module)
    assert not ready.step(ready.module)
    assert show(ready.module) == before


def test_a_dtype_other_than_the_recorded_one_is_reported_with_both_and_the_place() -> None:
    ready = _verified()
    node = ready.node("linear")
    node.meta["fact"] = replace(node.meta["fact"], dtype=torch.float16)
    with pytest.raises(InvariantError) as raised:
        ready.step(ready.module)
    text = str(raised.value)
    assert text.startswith("same dtype: %linear (module 'linear', test_verify.py:")
    assert "return torch.exp(self.linear(x))" in text
    assert "gives torch.bfloat16 without autocast, and torch.float16 under eager autocast" in text


def test_a_cast_that_is_missing_is_reported() -> None:
    ready = _verified()
    cast = ready.node("x_bf16")
    cast.replace_all_uses_with(ready.node("x"))
    ready.module.graph.erase_node(cast)
    with pytest.raises(InvariantError, match=r"obeyed: %linear .* argument to cast to torch\.bfloat16"):
        ready.step(ready.module)


def test_a_cast_too_many_is_reported() -> None:
    ready = _verified()
    exp = ready.node("exp")
    with ready.module.graph.inserting_before(exp):
        widened = ready.module.graph.call_function(TO_DTYPE, (ready.node("linear"), torch.float32))
    exp.replace_input_with(ready.node("linear"), widened)
    with pytest.raises(InvariantError, match=r"same dtype: %exp .* gives torch\.float32 without autocast"):
        ready.step(ready.module)


def test_a_mark_of_a_region_that_is_left_is_reported() -> None:
    ready = _verified()
    with ready.module.graph.inserting_before(ready.node("exp")):
        ready.module.graph.call_function(enter_region, cast("Any", (BF16,))).meta["fact"] = None
    with pytest.raises(InvariantError, match="flat: the mark of a region is left"):
        ready.step(ready.module)


def test_another_gradient_history_is_a_fault_of_the_capture() -> None:
    ready = _verified()
    node = ready.node("exp")
    node.meta["fact"] = replace(node.meta["fact"], requires_grad=False)
    with pytest.raises(
        CaptureError, match=r"gradient history of %exp .* False in eager and True in the graph"
    ):
        ready.step(ready.module)


def test_a_leaf_that_forward_makes_is_a_fault_of_the_capture() -> None:
    def makes_a_leaf(x: Tensor, w: Tensor) -> Tensor:
        return torch.mm(x.detach().requires_grad_(), w)

    ready = prepared(Verify, makes_a_leaf, torch.ones(2, 4), torch.ones(4, 4))
    with pytest.raises(CaptureError, match="was changed out of the recorder's sight"):
        ready.step(ready.module)
