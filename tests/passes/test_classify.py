"""The policy's rule for every operator."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fxamp.errors import PolicyError
from fxamp.ir.facts import Fact, fact_of
from fxamp.ir.regions import Region
from fxamp.passes.classify import Classify, castable
from fxamp.policy import CastPolicy, Policy
from tests.passes.checks import CPU, prepared

CUDA = Policy.native("cuda", torch.float16).on("cpu")
OFF = Region("cpu", enabled=False, dtype=torch.bfloat16)


def _program(x: Tensor) -> Tensor:
    return torch.cat([torch.mm(x, x), F.mse_loss(x, x, reduction="none").bfloat16()]).relu()


def test_every_operator_with_a_rule_has_its_decision_and_no_other_has() -> None:
    ready = prepared(Classify, _program, torch.ones(2, 2))
    assert ready.step(ready.module)
    assert not ready.step(ready.module)
    decisions = {
        node.name: (node.meta["decision"].rule.cast, node.meta["decision"].target)
        for node in ready.module.graph.nodes
        if "decision" in node.meta
    }
    assert decisions == {
        "mm": (CastPolicy.LOWER_PRECISION_FP, torch.bfloat16),
        "mse_loss": (CastPolicy.FP32, torch.float32),
        "cat": (CastPolicy.PROMOTE, None),
    }


def test_in_a_region_that_is_off_no_operator_has_a_decision() -> None:
    ready = prepared(Classify, _program, torch.ones(2, 2), region=OFF)
    assert not ready.step(ready.module)


def test_a_banned_operator_is_refused_with_its_source_line() -> None:
    ready = prepared(Classify, F.binary_cross_entropy, torch.rand(2), torch.rand(2), policy=CUDA)
    with pytest.raises(
        PolicyError, match="binary_cross_entropy is unsafe to autocast, at %binary_cross_entropy"
    ):
        ready.step(ready.module)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.ones(1), True),
        (torch.ones(1, dtype=torch.bfloat16), True),
        (torch.ones(1).to(torch.float8_e4m3fn), True),
        (torch.ones(1, dtype=torch.float64), False),
        (torch.ones(1, dtype=torch.int32), False),
        (torch.ones(1, dtype=torch.complex64), False),
        (torch.ones(1, device="meta"), False),
    ],
)
def test_what_is_castable(tensor: Tensor, expected: bool) -> None:
    fact = fact_of(tensor)
    assert isinstance(fact, Fact)
    assert castable(fact, CPU) == expected


def test_what_is_no_tensor_is_not_castable() -> None:
    assert not castable(None, CPU)
