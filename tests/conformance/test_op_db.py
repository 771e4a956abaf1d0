"""Every operator in torch's own database, converted against eager autocast: results, gradients, random state.

The default run takes a few operators of each kind, ``-m opinfo`` all of them.  The policies are the CPU's
own and, installed over the CPU's kernels, the one of CUDA (``cuda_policy_on_cpu``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext

import pytest
import torch

from fxamp.policy import Policy
from tests.conformance import cuda_policy_on_cpu
from tests.conformance.comparison import Call, Tally, compare
from tests.conformance.op_samples import OPERATORS, calls_of, unseeded

F16, BF16 = torch.float16, torch.bfloat16
PARTS = 8
SAMPLES = 4

POLICIES = {
    "cpu-bf16": Policy.native("cpu", BF16),
    "cpu-f16": Policy.native("cpu", F16),
    "cuda-f16": cuda_policy_on_cpu.policy(F16),
}

_VALUE = "Python gets a value out of a tensor, which a graph cannot hold"
_FUNCTION = "a custom autograd.Function takes part in the gradient"
_SIZE = "the result's size depends on values"
EAGER = {
    "addbmm": "torch's fake kernel of addbmm_ refuses a first argument that the real one broadcasts",
    "allclose": _VALUE,
    "corrcoef": "checks its weights by value (torch.equal)",
    "cov": "checks its weights by value (torch.equal)",
    "equal": _VALUE,
    "linalg.lstsq": "the kernel picks the size of the residuals by the rank",
    "linalg.lstsq.grad_oriented": "the kernel picks the size of the residuals by the rank",
    "nn.functional.ctc_loss": _SIZE,
    "tensor_split": "where the indices are a tensor, the sizes of the results are its values",
    "nn.functional.gaussian_nll_loss": "refuses negative variances by value",
    "nn.functional.linear_cross_entropy.chunked": _FUNCTION,
    "nn.functional.linear_cross_entropy.chunked_none": _FUNCTION,
}
"""The operators with calls that cannot be captured, and why; those calls prove nothing about a graph."""

_FEW = """
    add mul div.no_rounding_mode sub pow square float_power exp log sqrt rsqrt reciprocal clamp where lerp
    addcmul addcdiv atan2 matmul mm bmm mv addmm addmv baddbmm einsum inner dot cumsum cumprod sum mean prod
    var norm cat stack index_put scatter_add gather index_add masked_fill roll ldexp softmax log_softmax
    logsumexp nn.functional.softplus nn.functional.gelu nn.functional.relu nn.functional.linear
    nn.functional.conv2d nn.functional.conv_transpose2d nn.functional.scaled_dot_product_attention
    nn.functional.layer_norm nn.functional.batch_norm nn.functional.cross_entropy nn.functional.mse_loss
    nn.functional.embedding nn.functional.dropout nn.functional.interpolate.bilinear linalg.det
    nn.functional.pad.reflect nn.functional.binary_cross_entropy
"""
FEW = _FEW.split()
"""A few operators of each kind: pointwise, products, reductions, indexing, layers and losses."""


@pytest.mark.parametrize("name", ["cpu-bf16", "cuda-f16"])
def test_operators_of_each_kind_are_eager_autocast(name: str, count: Callable[[object], None]) -> None:
    check(FEW, POLICIES[name], 1, count)


@pytest.mark.slow
@pytest.mark.opinfo
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", list(POLICIES))
def test_every_operator_is_eager_autocast(name: str, part: int, count: Callable[[object], None]) -> None:
    check(sorted(OPERATORS)[part::PARTS], POLICIES[name], SAMPLES, count)


@pytest.mark.slow
@pytest.mark.opinfo
@pytest.mark.parametrize("name", sorted(EAGER.keys() & OPERATORS.keys()))
def test_an_operator_that_is_listed_as_eager_has_calls_that_are(name: str) -> None:
    tally = Tally()
    for call in calls_of(name, BF16, 2 * SAMPLES):
        compare(call, POLICIES["cpu-bf16"], tally)
    assert tally.eager


def test_a_call_that_seeds_torch_and_restores_its_state_is_not_replayed_from_a_graph() -> None:
    def noise(x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return x + torch.rand_like(x)

    tally = Tally()
    compare(Call("noise", noise, (torch.ones(4),)), POLICIES["cpu-bf16"], tally)
    assert not tally.differences
    assert len(tally.eager) == 1


def test_an_operator_from_outside_of_torch_runs_in_the_region_that_its_kernel_may_consult() -> None:
    tally = Tally()
    with torch.library._scoped_library("fxamp_conformance", "FRAGMENT") as library:
        library.define("product(Tensor x) -> Tensor")
        library.impl("product", lambda x: torch.matmul(x, x), "CompositeExplicitAutograd")
        operator = torch.ops.fxamp_conformance.product.default
        compare(Call("product", operator, (torch.ones(3, 3),)), POLICIES["cpu-bf16"], tally)
    assert tally.forward == 1, tally.differences


def check(names: Iterable[str], policy: Policy, samples: int, count: Callable[[object], None]) -> None:
    """Compare calls of the operators *names*, say how many, and fail on any difference."""
    tally = Tally()
    unlisted: list[str] = []
    with unseeded(), nullcontext() if policy.table == "cpu" else cuda_policy_on_cpu.installed():
        for name in names:
            before = len(tally.eager)
            for call in calls_of(name, policy.low, samples):
                compare(call, policy, tally)
            if name not in EAGER:
                unlisted += [f"{call}: {reason}" for call, reason in tally.eager[before:]]
    count(tally)
    assert not tally.differences, "\n".join(map(str, tally.differences))
    assert not unlisted, "could not be captured:\n" + "\n".join(unlisted)
    assert tally.forward > tally.raised
