"""Which numbers an operator is given, and whether a dtype has them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxamp.ir.scalars import is_flushed, overflows, scalar_arguments

aten = torch.ops.aten
LOW = (torch.float16, torch.bfloat16)
CALLS = {
    "a float where a tensor may be": (aten.add.Tensor, ("x", 1e-12), {}, [("other", 1e-12)]),
    "an int where a tensor may be": (aten.mul.Tensor, ("x", 100000), {}, [("other", 100000.0)]),
    "a keyword": (aten.add.Tensor, ("x", "y"), {"alpha": 2}, [("alpha", 2.0)]),
    "two bounds": (aten.clamp.default, ("x", -1, 0.5), {}, [("min", -1.0), ("max", 0.5)]),
    "one bound": (aten.clamp.default, ("x", None, 0.5), {}, [("max", 0.5)]),
    "a fill, not a size": (aten.full.default, ([8, 8], -1e9), {}, [("fill_value", -1e9)]),
    "no dimension": (aten.softmax.int, ("x", 1), {}, []),
    "no flag": (aten.mul.Tensor, ("x", True), {}, []),
    "a float": (aten.layer_norm.default, ("x", [8], None, None, 1e-12), {}, [("eps", 1e-12)]),
}


@pytest.mark.parametrize("case", CALLS)
def test_the_numbers_that_an_operator_computes_with_are_found_by_name(case: str) -> None:
    operator, args, kwargs, expected = CALLS[case]
    assert list(scalar_arguments(operator, args, kwargs)) == expected


@given(value=st.floats(width=32, allow_nan=False), dtype=st.sampled_from(LOW))
def test_a_number_is_flushed_if_and_only_if_torch_makes_0_of_it(value: float, dtype: torch.dtype) -> None:
    rounded = torch.tensor(value, dtype=torch.float32).to(dtype).item()
    assert is_flushed(value, dtype) == (value != 0 and rounded == 0)


@given(value=st.floats(width=32, allow_nan=False), dtype=st.sampled_from(LOW))
def test_a_number_overflows_if_and_only_if_torch_refuses_to_fill_with_it(
    value: float, dtype: torch.dtype
) -> None:
    try:
        torch.zeros(2, dtype=dtype).masked_fill(torch.tensor([True, False]), value)
        refused = False
    except RuntimeError:
        refused = True
    assert overflows(value, dtype) == refused


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_what_is_not_finite_fits(dtype: torch.dtype) -> None:
    for value in (math.inf, -math.inf, math.nan):
        assert not overflows(value, dtype)
        assert not is_flushed(value, dtype)
