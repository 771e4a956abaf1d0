"""Elements that become Inf are counted exactly; those that become 0 where they are a part of their row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxamp.export import lost_elements as scan
from fxamp.export.lost_elements import Lost, lost_elements

F16, BF16 = torch.float16, torch.bfloat16
FLOATS = st.floats(width=32) | st.sampled_from([0.0, 1e-9, 65519.0, 65520.0, 1e-41, 3.39e38, 3.4e38])


@given(
    rows=st.integers(1, 5).flatmap(
        lambda width: st.lists(st.lists(FLOATS, min_size=width, max_size=width), min_size=1)
    ),
    dtype=st.sampled_from([F16, BF16]),
)
def test_the_elements_that_become_inf_are_those_of_a_cast(
    rows: list[list[float]], dtype: torch.dtype
) -> None:
    weight = torch.tensor(rows, dtype=torch.float32)
    lost = weight[weight.to(dtype).isinf() & weight.isfinite()]
    infinite, _ = lost_elements(weight, dtype)
    if not lost.numel():
        assert infinite is None
    else:
        assert infinite is not None
        assert (infinite.count, infinite.total) == (lost.numel(), weight.numel())
        assert abs(infinite.extreme) == lost.abs().max()


@given(
    rows=st.lists(st.lists(FLOATS, min_size=3, max_size=3), min_size=1, max_size=6),
    dtype=st.sampled_from([F16, BF16]),
)
def test_the_rows_are_judged_one_by_one(rows: list[list[float]], dtype: torch.dtype) -> None:
    counts = [lost_elements(torch.tensor(row), dtype)[1] for row in rows]
    _, together = lost_elements(torch.tensor(rows), dtype)
    assert (together.count if together else 0) == sum(lost.count for lost in counts if lost)


def test_it_does_not_matter_in_how_many_parts_a_weight_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = (torch.randn(11, 37) * torch.logspace(-12, 9, 37)).t()
    whole = lost_elements(weight, F16)
    monkeypatch.setattr(scan, "_PART", 40)
    assert lost_elements(weight, F16) == whole
    assert lost_elements(weight.contiguous(), F16) == whole
    assert all(whole)


def test_a_row_of_tiny_weights_matters_and_a_few_tiny_elements_do_not() -> None:
    weight = torch.ones(4, 8)
    weight[:, :3] = 1e-9
    assert lost_elements(weight, F16) == (None, None)
    weight[2] = torch.linspace(0, 7e-9, 8)  # of which one is 0 anyway
    _, flushed = lost_elements(weight, F16)
    assert flushed == Lost(7, 32, weight[2, -1].item())


@pytest.mark.parametrize(("deviation", "matters"), [(1e-2, False), (1e-6, False), (1e-7, True), (1e-9, True)])
def test_normal_weights_of_a_deviation_that_float16_has_fit(deviation: float, matters: bool) -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * deviation
    _, flushed = lost_elements(weight, F16)
    assert (flushed is not None) == matters
    assert lost_elements(weight, BF16) == (None, None)


def test_elements_that_round_to_the_largest_number_and_infinite_ones_fit() -> None:
    weight = torch.tensor([65519.0, -65519.0, math.inf, -math.inf, math.nan, 0.0])
    assert lost_elements(weight, F16) == (None, None)
    infinite, flushed = lost_elements(torch.tensor([65520.0, -70000.0, math.inf]), F16)
    assert infinite == Lost(2, 3, -70000.0)
    assert flushed is None


def test_of_rounded_weights_inf_is_taken_for_what_overflowed() -> None:
    weight = torch.tensor([1.0, 70000.0, -1e9]).half()
    assert lost_elements(weight, F16)[0] == Lost(2, 3, math.inf)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 1 << 21), (3, 5, 7)], ids=str)
def test_every_shape_is_looked_at_whole(shape: tuple[int, ...]) -> None:
    weight = torch.ones(shape)
    assert lost_elements(weight, F16) == (None, None)
    if weight.numel():
        weight.view(-1)[-1] = 1e9
        assert lost_elements(weight, F16) == (Lost(1, weight.numel(), 1e9), None)


def test_of_a_tensor_without_values_or_of_another_layout_nothing_is_known() -> None:
    assert lost_elements(torch.full((8,), 1e9, device="meta"), F16) == (None, None)
    assert lost_elements(torch.full((8,), 1e9).to_sparse(), F16) == (None, None)
