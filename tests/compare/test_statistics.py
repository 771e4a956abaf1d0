"""The numbers are right: against numpy in float64, element by element."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxamp.compare.statistics import ULP_BOUNDS, Tally, ordinal

_FLOATS = st.lists(
    st.tuples(
        st.floats(width=16, allow_nan=False, allow_infinity=False, min_value=-1000, max_value=1000),
        st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-1000, max_value=1000),
    ),
    min_size=1,
    max_size=40,
)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_neighbours_of_every_value_are_one_ulp_apart(dtype: torch.dtype) -> None:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = values[torch.isfinite(values)]
    order = torch.unique(finite.float())  # without -0
    ranks = torch.searchsorted(order, finite.float()) - torch.searchsorted(order, torch.zeros(1))
    assert torch.equal(ordinal(finite), ranks.to(torch.int32))


@given(_FLOATS)
@settings(max_examples=60, deadline=None)
def test_the_numbers_are_those_of_a_plain_computation(pairs: list[tuple[float, float]]) -> None:
    candidate = torch.tensor([one for one, _ in pairs], dtype=torch.float16)
    reference = torch.tensor([other for _, other in pairs])
    tally = Tally(torch.float16)
    tally.add(candidate, reference)
    found = tally.read()
    error = (candidate.double() - reference.double()).abs()
    assert found.count == len(pairs)
    assert found.max_abs == pytest.approx(float(error.max()), rel=1e-6)
    assert found.underflow == int(((candidate == 0) & (reference != 0)).sum()) / len(pairs)
    assert found.magnitude == float(candidate.abs().max())
    assert sum(found.ulps) == len(pairs)
    if error.max() > 1e-12 and reference.abs().max() > 1e-12:
        noise, signal = float((error**2).sum()), float((reference.double() ** 2).sum())
        assert found.sqnr_db == pytest.approx(10 * math.log10(signal / noise), abs=0.01)
    steps = (ordinal(candidate) - ordinal(reference.half())).abs()
    bounds = torch.tensor(ULP_BOUNDS)
    bins = torch.bincount(torch.bucketize(steps, bounds.int()), minlength=len(ULP_BOUNDS) + 1)
    assert found.ulps == tuple(bins.tolist())


def test_inf_and_nan_are_counted_only_where_the_reference_is_finite() -> None:
    nan, inf = math.nan, math.inf
    candidate = torch.tensor([1.0, inf, nan, -inf, inf, nan], dtype=torch.float16)
    reference = torch.tensor([1.0, 1e6, 2.0, -inf, inf, nan])
    tally = Tally(torch.float16)
    tally.add(candidate, reference)
    found = tally.read()
    assert (found.inf, found.nan) == (1 / 6, 1 / 6)
    assert found.max_abs == 0
    assert found.noise == inf


def test_a_scale_is_taken_out() -> None:
    tally = Tally()
    tally.add(torch.tensor([2.0, 0.0], dtype=torch.float16) * 1024, torch.tensor([2.0, 1e-9]), 1024.0)
    found = tally.read()
    assert found.underflow == 0.5
    assert found.max_abs == pytest.approx(1e-9)
    assert found.magnitude == 2048


def test_what_is_counted_in_pieces_is_counted_as_a_whole() -> None:
    torch.manual_seed(0)
    reference = torch.randn(100_000)
    candidate = (reference * 1.001).bfloat16()
    whole, first, second = Tally(torch.bfloat16), Tally(torch.bfloat16), Tally(torch.bfloat16)
    whole.add(candidate, reference)
    first.add(candidate[:30_000], reference[:30_000])
    second.add(candidate[30_000:], reference[30_000:])
    first.merge(second)
    one, other = whole.read(), first.read()
    assert (one.ulps, one.max_abs, one.max_rel) == (other.ulps, other.max_abs, other.max_rel)
    assert one.sqnr_db == pytest.approx(other.sqnr_db, abs=1e-3)


def test_layouts_that_agree_are_compared_in_place() -> None:
    reference = torch.randn(2, 8, 5, 5).to(memory_format=torch.channels_last)
    tally = Tally(torch.float16)
    tally.add(reference.half(), reference)
    other = Tally(torch.float16)
    other.add(reference.half().contiguous(), reference)
    assert tally.read().ulps == other.read().ulps
    assert tally.read().max_abs == other.read().max_abs
