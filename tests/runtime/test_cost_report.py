"""``amp.cost()``: exact counts and bytes in symbolic sizes, and from where on mixed precision pays."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp.errors import ArgumentError
from fxamp.ir.device import DEVICES, Device, measure
from fxamp.runtime.cost_report import CostReport

F32, BF16 = torch.float32, torch.bfloat16


def _device(*, bandwidth: float = 1e9, launch: float = 0.0, low: float = 1e12, high: float = 1e12) -> Device:
    return Device("a device", bandwidth, launch, MappingProxyType({F32: high, BF16: low}), "made up")


def _report() -> CostReport:
    model = nn.Sequential(nn.Linear(64, 32, bias=False), nn.ReLU(), nn.Linear(32, 10, bias=False))
    amp = fxamp.convert(model.eval(), dtype=BF16)
    with torch.no_grad():
        amp(torch.randn(4, 64))
    return amp.cost()


def test_counts_and_bytes_are_expressions_in_the_sizes_of_the_inputs() -> None:
    cost = _report().mixed
    assert cost.symbols == ("input_1_0",)
    assert (cost.kernels, cost.casts, cost.weight_casts) == (6, 3, 2)
    weights = 64 * 32 + 32 * 10
    (batch,) = cost.activation_bytes.free_symbols
    assert cost.weight_bytes == 2 * weights
    assert cost.activation_bytes == batch * 2 * (64 + 32 + 32 + 32 + 32 + 10)
    assert cost.cast_bytes == 6 * weights + 6 * 64 * batch
    assert cost.flops == 2 * batch * weights


def test_the_cost_is_evaluated_for_given_sizes() -> None:
    cost = _report().mixed.at(input_1_0=8)
    assert cost.symbols == ()
    assert cost.flops == 2 * 8 * (64 * 32 + 32 * 10)


def test_a_float32_run_has_no_casts_and_twice_the_bytes() -> None:
    report = _report()
    assert (report.float32.kernels, report.float32.casts) == (3, 0)
    assert report.float32.weight_bytes == 2 * report.mixed.weight_bytes
    assert report.float32.flops == report.mixed.flops


def test_a_view_costs_nothing_and_a_gather_reads_what_it_gives() -> None:
    def program(x: Tensor, table: Tensor, index: Tensor) -> Tensor:
        return x.t().reshape(-1)[:2] + table[index]

    amp = fxamp.convert(program, device_type="cpu", dtype=BF16)
    with torch.no_grad():
        amp(torch.randn(1, 2), torch.randn(100), torch.tensor([0, 1]))
    names = [step.name for step in amp.cost().mixed.steps]
    assert names == ["index", "add"]
    index, _ = amp.cost().mixed.steps
    assert index.activations + index.weights == 2 * 4 * 2 + 2 * 8


def test_all_programs_are_listed_and_the_last_one_counts() -> None:
    amp = fxamp.convert(nn.Linear(4, 4), dtype=BF16)
    amp(torch.randn(2, 4))
    with torch.no_grad():
        amp(torch.randn(2, 4))
    report = amp.cost()
    assert len(report.programs) == 2
    assert report.mixed in [program.mixed for program in report.programs]


def test_mixed_precision_pays_from_where_the_products_saved_are_worth_the_casts() -> None:
    report = _report()
    slow_in_float32 = _device(bandwidth=1e12, launch=1e-6, low=1e12, high=1e10)
    size = report.break_even(slow_in_float32, "input_1_0")
    assert size is not None
    assert report.speedup(slow_in_float32, input_1_0=size) >= 1
    assert report.speedup(slow_in_float32, input_1_0=size - 1) < 1


def test_mixed_precision_never_pays_where_only_launches_count_and_the_same_rate_is_reached() -> None:
    assert _report().break_even(_device(bandwidth=1e30, launch=1.0), "input_1_0") is None


def test_a_size_that_is_missing_or_unknown_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"depends on the sizes \['input_1_0'\]; missing"):
        _report().speedup(_device())
    with pytest.raises(ArgumentError, match="unknown: \\['batch'\\]"):
        _report().break_even(_device(), "batch", input_1_0=3)


def test_the_inside_of_a_checkpoint_counts() -> None:
    model = nn.Linear(4, 4, bias=False)

    class Checkpointing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=False)

    amp = fxamp.convert(Checkpointing(), dtype=BF16)
    amp(torch.randn(2, 4))
    cost = amp.cost().mixed
    assert [step.name for step in cost.steps] == ["to", "to", "linear"]
    assert cost.weight_casts == 1
    assert cost.symbols == ("x_0",)


def test_nothing_captured_has_no_cost() -> None:
    with pytest.raises(LookupError, match="call the model first"):
        fxamp.convert(nn.Linear(2, 2), dtype=BF16).cost()


def test_every_preset_names_its_source() -> None:
    for device in DEVICES.values():
        assert re.search(r"[a-z]\.[a-z]+/\w", device.source)  # a page that can be looked at
        assert device.rates[torch.float16] > device.rates[F32]


def test_this_machine_can_be_measured() -> None:
    device = measure("cpu", size=16, rounds=1)
    assert device.bandwidth > 0
    assert device.launch > 0
    assert set(device.rates) == {F32, BF16, torch.float16}
    with pytest.raises(ArgumentError, match="at least 1"):
        measure("cpu", size=0)
