"""The oracle itself: the wrappers on the CPU's key against torch's own on CUDA's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fxamp.policy import CastPolicy
from tests.conformance.cuda_policy_on_cpu import BANNED, installed, policy
from tests.policy.probe import Observed, arguments, observe, overload, region

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = [
    [F32], [F16], [BF16], [F64], [torch.int64],
    [F32, F16], [F16, F32], [BF16, F32], [F32, F16, BF16], [F16, F64],
]  # fmt: skip
MOST = 200
"""At least as many observations, a dtype pattern of an operator each, are compared."""


@pytest.mark.parametrize("low", [F16, BF16], ids=str)
def test_the_wrappers_do_what_the_dispatchers_own_do_on_cuda(low: torch.dtype) -> None:
    operators = [op for op, rule in policy(low).rules.items() if rule.cast is not CastPolicy.CUDNN_RNN]
    with region("cuda", low):
        wanted = [observed(op, dtypes, "cuda") for op in operators for dtypes in DTYPES]
    with installed(), region("cpu", low):
        found = [observed(op, dtypes, "cpu") for op in operators for dtypes in DTYPES]
    assert len(found) > MOST
    assert found == wanted


def test_what_only_the_cpu_casts_is_left_alone() -> None:
    op = torch.ops.aten.cat.default
    with installed(), region("cpu", F16):
        assert observe(op, arguments(op, [F32, F16], ["cpu"])) == Observed((), "aten::cat")


def test_the_cpus_own_wrappers_come_back() -> None:
    op = torch.ops.aten.cat.default
    with installed():
        pass
    with region("cpu", F16):
        assert observe(op, arguments(op, [F32, F16], ["cpu"])).casts == (("tensors[1]", F32),)


def test_a_banned_operator_has_torchs_own_text() -> None:
    op = torch.ops.aten.binary_cross_entropy.default
    with region("cuda", F16):
        assert observe(op, arguments(op, [F32], ["cuda"])).message == BANNED


def test_a_leaf_is_cast_once_in_a_region_and_again_in_the_next() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    with installed():
        with torch.autocast("cpu", F16):
            one, other = torch.mm(weight, weight), torch.mv(weight, torch.ones(2))
            assert cast_of(one) is cast_of(other)
        with torch.autocast("cpu", F16):
            later = torch.mv(weight, torch.ones(2))
    assert cast_of(one) is not cast_of(later)


def cast_of(result: torch.Tensor) -> object:
    """What computed the first argument of the operator that gave *result*, for the gradient."""
    assert result.grad_fn is not None
    return result.grad_fn.next_functions[0][0]


def observed(name: str, dtypes: list[torch.dtype], device: str) -> Observed:
    op = overload(name)
    seen = observe(op, arguments(op, dtypes, [device]))
    first = (seen.message or "").partition("\n")[0].partition("Exception raised from")[0]
    return replace(seen, message=first) if seen.message else seen
