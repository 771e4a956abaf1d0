"""``compare`` finds what is wrong: planted faults are among the first three rows, and of the right kind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxamp
from fxamp.compare import Comparison, Kind, Row
from tests.compare.planted import FAULTS, Fault


def _is_planted(row: Row, fault: Fault) -> bool:
    place = row.where.source + row.where.module
    kinds = {finding.kind for finding in row.findings}
    return fault.op in row.op and fault.source in place and not kinds.isdisjoint(fault.kinds)


def _assert_found(found: Comparison, fault: Fault) -> None:
    assert any(_is_planted(row, fault) for row in found.worst(3)), str(found)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_among_the_first_three_rows_of_eager_autocast(name: str) -> None:
    fault = FAULTS[name]
    model, inputs = fault.make()
    found = fxamp.compare(model, inputs, ("float32",), dtype=fault.dtype, **fault.options)
    assert not found.boundaries
    _assert_found(found, fault)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_among_the_first_three_rows_of_the_converted_model(name: str) -> None:
    fault = FAULTS[name]
    model, inputs = fault.make()
    amp = fxamp.convert(model, dtype=fault.dtype)
    found = fxamp.compare(amp, inputs, ("float32",), **fault.options)
    assert not found.boundaries
    _assert_found(found, fault)


def test_the_first_inf_is_named_with_module_and_line() -> None:
    model, inputs = FAULTS["gated feed-forward"].make()
    found = fxamp.compare(model, inputs, ("float32",), dtype=torch.float16)
    assert found.first_nonfinite is not None
    assert found.first_nonfinite.row.where.module == "wo"
    assert found.first_nonfinite.input == 0
    assert found.min_sqnr == -torch.inf


def test_the_input_of_a_loader_is_told_by_its_number() -> None:
    model, loader = FAULTS["Inf in one input of a loader"].make()
    found = fxamp.compare(model, loader, ("float32",), dtype=torch.float16)
    assert found.inputs == 6
    finding = found.worst(1)[0].findings[0]
    assert (finding.kind, finding.input) == (Kind.BAD_INPUT, 3)
    assert "1 Inf" in finding.detail


def test_a_loss_scale_cures_gradients_that_vanish() -> None:
    fault = FAULTS["gradients of a tiny loss"]
    model, inputs = fault.make()
    found = fxamp.compare(model, inputs, ("float32",), dtype=fault.dtype, loss_scale=2.0**16, **fault.options)
    assert not any(finding.kind is Kind.GRADIENT_UNDERFLOW for _, finding in found.findings)
    rows = [row for row in found.rows if row.gradient is not None and row.gradient.count]
    assert rows
    assert all(row.gradient is not None and row.gradient.noise < 0.1 for row in rows)


def test_more_precision_does_not_help_a_formula_that_is_wrong_in_float32_too() -> None:
    def cosine(x: Tensor) -> Tensor:
        y: Tensor = x / x.norm(dim=-1, keepdim=True)
        return y

    found = fxamp.compare(cosine, torch.zeros(2, 4), ("float32",), device_type="cpu", dtype=torch.bfloat16)
    assert found.worst(1)[0].kind is Kind.NOT_PRECISION
    assert found.first_nonfinite is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_healthy_model_has_no_findings_but_rounding(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 10))
    found = fxamp.compare(model, torch.randn(16, 64), dtype=dtype, backward=True)
    assert found.findings == ()
    assert found.bits.equal
    assert found.min_sqnr > 40
