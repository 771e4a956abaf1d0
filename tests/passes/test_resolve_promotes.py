"""Operators whose inputs must agree: who has a say in the common dtype, and who is only cast to it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fxamp.errors import PolicyError
from fxamp.ir.regions import Region
from fxamp.passes.resolve_promotes import ResolvePromotes
from fxamp.policy import Policy
from tests.passes.checks import prepared

CUDA = Policy.native("cuda", torch.float16).on("cpu")
F16 = Region("cpu", enabled=True, dtype=torch.float16)


def _target(function: object, *dtypes: torch.dtype, policy: Policy = CUDA) -> torch.dtype | None:
    """The dtype that the last operator of *function* is promoted to, for inputs of these *dtypes*."""
    assert callable(function)
    args = [torch.ones(2, 3, dtype=dtype) for dtype in dtypes]
    ready = prepared(ResolvePromotes, function, *args, policy=policy, region=F16)
    node = next(node for node in reversed(ready.module.graph.nodes) if "decision" in node.meta)
    assert node.meta["decision"].target is None
    assert ready.step(ready.module)
    assert not ready.step(ready.module)
    target: torch.dtype | None = node.meta["decision"].target
    return target


_H, _F, _B, _D = torch.float16, torch.float32, torch.bfloat16, torch.float64


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ((_H, _H, _H), _H),
        ((_H, _F, _H), _F),
        ((_F, _B, _B), _F),
        ((_H, _H, torch.int64), _H),
        ((_D, _H, _H), _H),
        ((_D, _D, _D), _H),
    ],
)
def test_any_float32_makes_it_float32(dtypes: tuple[torch.dtype, ...], expected: torch.dtype) -> None:
    assert _target(torch.addcmul, *dtypes) is expected


@pytest.mark.parametrize("dtypes", [(_B, _F, _F), (_B, _B, _B), (_H, _B, _H)])
def test_another_low_dtype_before_a_float32_is_refused_as_in_eager(dtypes: tuple[torch.dtype, ...]) -> None:
    with pytest.raises(
        PolicyError, match=r"Unexpected floating ScalarType.* torch\.bfloat16 where .* at %addcmul"
    ):
        _target(torch.addcmul, *dtypes)


def test_an_optional_tensor_has_no_say() -> None:
    def bilinear(x: Tensor, bias: Tensor) -> Tensor:
        return torch.bilinear(x, x, x.new_ones(2, 3, 3), bias)

    low = torch.ones(2, 3, dtype=_H)
    ready = prepared(ResolvePromotes, bilinear, low, low[:, 0], policy=CUDA, region=F16)
    bias = ready.node("bias")
    bias.meta["fact"] = replace(bias.meta["fact"], dtype=_F)  # which CPU autocast would refuse
    ready.step(ready.module)
    assert ready.node("bilinear").meta["decision"].target is _H


def test_the_elements_of_a_list_have_a_say() -> None:
    native = Policy.native("cpu", torch.float16)
    assert _target(lambda x, y: torch.cat([x, y]), _H, _F, policy=native) is _F
    assert _target(lambda x, y: torch.cat([x, y]), _H, _H, policy=native) is _H
