"""The proof that a packed weight may be used: equal bits on inputs of every kind, and a gain in time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

import fxamp
from fxamp.errors import ArgumentError
from fxamp.runtime.prepack import Packing, inputs_like, median_ratio, packing_of, prove, same_bits

BF16 = torch.bfloat16
LOW = (torch.float16, BF16)
PACKED = torch.ones(1)


def half_the_time(plain: Any, other: Any) -> float:
    return 0.5


FAST = Packing(ratio=half_the_time)


def _plain(x: Tensor) -> Tensor:
    return x * 2


def _verdict(other: Callable[[Tensor], Tensor], packing: Packing = FAST, x: Tensor | None = None) -> Any:
    return prove(packing, PACKED, torch.ones(3, 4, dtype=BF16) if x is None else x, _plain, other)


def test_the_same_bits_in_less_time_are_a_proof() -> None:
    verdict = _verdict(_plain)
    assert verdict.packed is PACKED
    assert verdict.why == "the same bits in 0.50 of the plain time"


def test_without_a_gain_beyond_the_margin_calls_stay_plain() -> None:
    def barely(plain: Any, other: Any) -> float:
        return 0.91

    verdict = _verdict(_plain, Packing(ratio=barely))
    assert verdict.packed is None
    assert verdict.why == "the same bits but no gain: 0.91 of the plain time"
    assert _verdict(_plain, Packing(ratio=barely, margin=0.05)).packed is PACKED


# Kernels that are right for most inputs, each wrong for one kind of them.
FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "the input of the call": lambda x: torch.where(x == 1, 3, _plain(x)),
    "numbers of usual size": lambda x: torch.where((x.abs() > 0.01) & (x.abs() < 0.9), 0, _plain(x)),
    "large numbers": lambda x: _plain(x).clamp(-1e10, 1e10),
    "small numbers": lambda x: torch.where((x.abs() < 1e-12) & (x.abs() > 1e-30), 0, _plain(x)),
    "subnormal numbers": lambda x: torch.where((x.abs() < torch.finfo(BF16).tiny) & (x != 0), 0, _plain(x)),
    "zeros of both signs": lambda x: _plain(x) + 0,
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_kernel_that_is_wrong_for_one_kind_of_numbers_is_found_out(kind: str) -> None:
    verdict = _verdict(FAULTS[kind], x=torch.ones(32, 64, dtype=BF16))
    assert verdict.packed is None
    assert verdict.why == f"other bits for {kind}"


def test_a_result_with_other_strides_is_another_result() -> None:
    verdict = _verdict(lambda x: _plain(x).t().contiguous().t())
    assert verdict.why == "other bits for the input of the call"


def test_a_kernel_that_fails_is_a_verdict() -> None:
    def fails(x: Tensor) -> Tensor:
        raise RuntimeError("could not create a primitive\nmore")

    assert _verdict(fails).why == "it fails: could not create a primitive"


@given(st.sampled_from(LOW), st.integers(1, 5), st.integers(1, 9), st.booleans())
def test_inputs_are_tried_in_the_sizes_and_strides_of_the_call(
    dtype: torch.dtype, rows: int, width: int, turned: bool
) -> None:
    x = torch.ones(width, rows, dtype=dtype).t() if turned else torch.ones(rows, width, dtype=dtype)
    found = list(inputs_like(x))
    assert found[0][1] is x
    assert {(one.dtype, one.shape, one.stride()) for _, one in found} == {(dtype, x.shape, x.stride())}
    assert len({kind for kind, _ in found}) == len(found) == 7


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_inputs_reach_from_subnormal_numbers_to_the_root_of_the_largest(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    kinds = dict(inputs_like(torch.ones(64, 64, dtype=dtype)))
    assert kinds["large numbers"].abs().amax() > limits.max**0.5
    assert (
        kinds["subnormal numbers"]
        .abs()
        .ne(0)
        .logical_and(kinds["subnormal numbers"].abs() < limits.tiny)
        .any()
    )
    zeros = kinds["zeros of both signs"]
    assert {bool(sign) for sign in zeros[zeros == 0].signbit()} == {False, True}
    assert all(bool(one.isfinite().all()) for kind, one in kinds.items())


def test_bits_are_the_same_where_both_have_some_nan() -> None:
    one = torch.tensor([0.0, float("nan"), 1.0], dtype=BF16)
    assert same_bits(one, one.clone())
    assert not same_bits(one, -one)  # the zero
    assert not same_bits(one, torch.tensor([0.0, 2.0, 1.0], dtype=BF16))
    assert not same_bits(one, one.float())


def test_time_is_compared_in_turn() -> None:
    calls: list[str] = []
    ratio = median_ratio(lambda: calls.append("plain"), lambda: calls.append("other"))
    assert ratio > 0
    assert calls.count("plain") == calls.count("other")


# --- what freeze is asked for -----------------------------------------------------------------------


def test_packing_is_asked_for() -> None:
    assert packing_of("off") is None
    assert packing_of("auto") == Packing()
    assert packing_of(FAST) is FAST
    with pytest.raises(ArgumentError, match=r"prepack is 'off', 'auto' or a Packing, not 'always'"):
        fxamp.freeze(fxamp.convert(torch.nn.Linear(2, 2), dtype=BF16), prepack="always")
    with pytest.raises(ArgumentError, match="at least 1"):
        Packing(layouts=0)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_a_cpu_without_kernels_refuses_in_its_own_words(dtype: torch.dtype) -> None:
    check = {torch.float16: "_is_mkldnn_fp16_supported", BF16: "_is_mkldnn_bf16_supported"}[dtype]
    if getattr(torch.ops.mkldnn, check)():
        assert Packing().refusal(dtype) == ""
    else:
        assert Packing().refusal(dtype).startswith("not on this CPU: ")


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_onednns_own_operators_take_part_in_float32() -> None:
    """The bits are another kernel's, or not; in either case the verdict says which, and is right."""
    weight, x, bias = torch.randn(48, 32), torch.randn(1, 32), torch.randn(48)
    packed = FAST.pack(weight, 1)
    assert torch.equal(packed.to_dense(), weight)

    def plain(x: Tensor) -> Tensor:
        return functional.linear(x, weight, bias)

    def other(x: Tensor) -> Tensor:
        return FAST.linear(x, packed, bias)

    verdict = prove(FAST, packed, x, plain, other)
    equal = all(same_bits(plain(one), other(one)) for _, one in inputs_like(x))
    assert (verdict.packed is packed) is equal


@pytest.mark.parametrize("rows", [1, 4, 64])
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_onednns_own_operators_in_low_precision(dtype: torch.dtype, rows: int) -> None:
    """The differential test, on a CPU that has the kernels: what a proof allows, other inputs bear out."""
    why = Packing().refusal(dtype)
    if why:
        pytest.skip(why)
    weight, bias = torch.randn(256, 128).to(dtype), torch.randn(256).to(dtype)
    packed = FAST.pack(weight, rows)
    assert torch.equal(packed.to_dense(), weight)

    def plain(x: Tensor) -> Tensor:
        return functional.linear(x, weight, bias)

    def other(x: Tensor) -> Tensor:
        return FAST.linear(x, packed, bias)

    verdict = prove(FAST, packed, torch.randn(rows, 128).to(dtype), plain, other)
    if verdict.packed is None:
        pytest.skip(verdict.why)
    for _ in range(50):
        x = (torch.randn(rows, 128) * 10 ** torch.empty(rows, 128).uniform_(-3, 3)).to(dtype)
        assert same_bits(plain(x), other(x))
