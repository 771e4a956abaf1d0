"""``clamped``: the constants that do not fit become the nearest that do, in a copy of the graph."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import fxamp
from fxamp.export.clamp import clamped
from fxamp.export.fits import Kind, unfit
from fxamp.ir.text import show

F16, BF16 = torch.float16, torch.bfloat16
X, ON = torch.randn(3, 8), torch.tensor([[True, False] * 4] * 3)


class Faulty(nn.Module):
    """Constants of every kind that float16 does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.layer.weight.data[0] = torch.tensor([1e6, -1e6, 70000.0, math.inf, -math.inf, 1.0, 0.0, 1e-9])
        self.layer.weight.data[1] = torch.tensor([1e-9, -1e-9, 0.0] + [1e-10] * 5)
        self.table: Tensor
        self.register_buffer("table", torch.tensor([-1e9, 2.0] * 4))

    def forward(self, x: Tensor, on: Tensor) -> Any:
        y = self.layer(x)
        bounded = y.sigmoid().clamp(1e-12, 0.9999)
        return y.masked_fill(on, -1e9), bounded / (bounded.sum() + 1e-12), y @ self.table, self.table + 1


def _graphs(dtype: torch.dtype) -> tuple[Faulty, GraphModule, GraphModule]:
    """A model, its graph and its frozen graph."""
    model = Faulty().eval()
    amp = fxamp.convert(model, dtype=dtype)
    with torch.no_grad():
        amp.capture(X, ON)
    return model, amp.graph_module, fxamp.freeze(amp, (X, ON)).graph_module


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def test_numbers_become_the_nearest_that_fit() -> None:
    _, module, _ = _graphs(F16)
    changed, _ = clamped(module)
    before, after = show(module).splitlines(), show(changed).splitlines()
    lines = [now.strip() for was, now in zip(before, after, strict=True) if was != now]
    assert lines == [
        "%clamp: f16[s26, 8] = clamp(%sigmoid, 6.103515625e-05, 0.99951171875)",
        "%masked_fill: f16[s26, 8] = masked_fill(%linear, %on, -65504.0)",
        "%add: f16[] = add(%sum_1, 6.103515625e-05)",
    ]


@pytest.mark.parametrize("frozen", [False, True], ids=["converted", "frozen"])
def test_elements_become_the_nearest_that_fit_and_infinite_ones_stay(frozen: bool) -> None:
    model, *modules = _graphs(F16)
    module, _ = clamped(modules[frozen], _weights(model))
    target = "layer.weight_f16" if frozen else "layer.weight"
    weight = module.get_parameter(target) if not frozen else module.get_buffer(target)
    tiny, most = torch.finfo(F16).smallest_normal, torch.finfo(F16).max
    expected = [most, -most, most, math.inf, -math.inf, 1.0, 0.0, tiny]
    assert weight[0].tolist() == expected
    assert weight[1].tolist() == [tiny, -tiny, 0.0] + [tiny] * 5
    assert torch.equal(weight[2:], model.layer.weight[2:].to(weight.dtype))
    table = "table_folded" if frozen else "table"  # what is rounded of it is computed once
    assert module.get_buffer(table).tolist() == [-most, 2.0] * 4


@pytest.mark.parametrize("frozen", [False, True], ids=["converted", "frozen"])
def test_what_was_changed_is_what_did_not_fit_and_then_everything_fits(frozen: bool) -> None:
    model, *modules = _graphs(F16)
    weights = _weights(model)
    module, changed = clamped(modules[frozen], weights)
    assert changed == unfit(modules[frozen], weights)
    assert {finding.kind for finding in changed} == set(Kind)
    now = {name: tensor.float() for name, tensor in module.named_buffers()} if frozen else {}
    assert unfit(module, {name.removesuffix("_f16"): tensor for name, tensor in now.items()}) == ()
    module.graph.lint()
    with torch.no_grad():
        filled = module(X, ON)[0]  # torch raises on the numbers that do not fit
    assert filled.dtype is F16
    assert filled[ON].eq(-65504).all()


@pytest.mark.parametrize("frozen", [False, True], ids=["converted", "frozen"])
def test_the_graph_that_was_given_and_the_model_stay_as_they_are(frozen: bool) -> None:
    model, *modules = _graphs(F16)
    module = modules[frozen]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    text, tensors = show(module), [*module.parameters(), *module.buffers()]
    kept = [tensor.clone() for tensor in tensors]
    copied, _ = clamped(module, _weights(model))
    assert copied is not module
    assert show(module) == text
    now = [*module.parameters(), *module.buffers()]
    assert all(one is other for one, other in zip(now, tensors, strict=True))
    assert all(map(torch.equal, now, kept))
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    shared = {id(tensor) for tensor in (*copied.parameters(), *copied.buffers())} & {id(t) for t in now}
    assert len(shared) == len(now) - 2  # all but the weight and the table


def test_a_graph_with_a_region_of_its_own_is_copied_too() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.pair = nn.Linear(8, 8), nn.Bilinear(8, 8, 4)

        def forward(self, x: Tensor, on: Tensor) -> Any:
            return self.pair(x, x), torch.where(on, self.layer(x), -1e9)

    model = Two().eval()
    amp = fxamp.convert(model, dtype=F16)
    with torch.no_grad():
        expected, _ = amp(X, ON)
        module, changed = clamped(amp.graph_module)
        paired, filled = module(X, ON)
    assert "run_in_region" in show(module)
    assert len(changed) == 1
    assert torch.equal(paired, expected)
    assert filled.min() == -65504


def test_a_graph_that_fits_is_not_copied() -> None:
    model = nn.Linear(8, 8).eval()
    amp = fxamp.convert(model, dtype=BF16)
    with torch.no_grad():
        amp.capture(X)
    assert clamped(amp.graph_module) == (amp.graph_module, ())
