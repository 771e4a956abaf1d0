"""Whatever way a weight changes, the next call has the new value.

A call in evaluation mode without gradients could keep rounded copies of the weights only if it could tell
that none has changed.  It cannot: ``weight.data.copy_`` and a write through NumPy count no version.  So a
converted module casts its weights in every call.  A frozen module keeps copies, and its weights change in the
documented ways alone: ``load_state_dict`` and ``to(device)``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import fxamp
from tests.models import autocast

BF16 = torch.bfloat16


class Tied(nn.Module):
    """Two layers that share one weight, and a third whose weight is used in float32 too."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(16, 16) for _ in range(3))
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        """A tensor ``[batch, 16]``."""
        y: Tensor = self.three(self.two(self.one(x).relu())) + self.three.weight.sum()
        return y


def _new(weight: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(weight.shape, generator=generator).to(weight)


def _in_place(model: Any) -> None:
    with torch.no_grad():
        model.one.weight.mul_(-0.5)


def _through_data(model: Any) -> None:
    model.one.weight.data.copy_(_new(model.one.weight))


def _other_data(model: Any) -> None:
    model.one.weight.data = _new(model.one.weight)


def _other_parameter(model: Any) -> None:
    model.three.weight = nn.Parameter(_new(model.three.weight))


def _loaded(model: Any) -> None:
    model.load_state_dict({name: _new(value) for name, value in model.state_dict().items()})


def _assigned(model: Any) -> None:
    model.load_state_dict({name: _new(value) for name, value in model.state_dict().items()}, assign=True)


def _to_float64_and_back(model: Any) -> None:
    model.to(torch.float64)
    model.one.weight.data.add_(1)
    model.to(torch.float32)


def _optimised(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def _fused(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def _foreach(model: Any) -> None:
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 2.0)


def _through_the_tie(model: Any) -> None:
    model.two.weight.data.neg_()


def _untied(model: Any) -> None:
    model.two.weight = nn.Parameter(_new(model.one.weight))


def _through_numpy(model: Any) -> None:
    model.one.weight.detach().numpy()[:] *= 3


def _through_a_view(model: Any) -> None:
    model.three.weight.detach()[2:5].fill_(2.0)


def _swapped(model: Any) -> None:
    one, three = model.one.weight.data, model.three.weight.data
    model.one.weight.data, model.three.weight.data = three, one


def _in_inference_mode(model: Any) -> None:
    with torch.inference_mode():
        model.one.weight.mul_(2)


def _parametrized(model: Any) -> None:
    if not parametrize.is_parametrized(model.three):
        parametrizations.weight_norm(model.three)


def _behind_a_parametrization(model: Any) -> None:
    _parametrized(model)
    model.three.parametrizations.weight.original0.data.mul_(2)


WAYS: dict[str, Callable[[Any], None]] = {
    "in place under no_grad": _in_place,
    "data.copy_": _through_data,
    "data =": _other_data,
    "another parameter": _other_parameter,
    "load_state_dict": _loaded,
    "load_state_dict(assign=True)": _assigned,
    "to(float64) and back": _to_float64_and_back,
    "an optimizer's step": _optimised,
    "a fused optimizer's step": _fused,
    "torch._foreach": _foreach,
    "through the module it is tied to": _through_the_tie,
    "untied": _untied,
    "memory shared with NumPy": _through_numpy,
    "through a view": _through_a_view,
    "swapped": _swapped,
    "in inference mode": _in_inference_mode,
    "a new parametrization": _parametrized,
    "the original of a parametrization": _behind_a_parametrization,
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("way", WAYS)
def test_a_converted_module_has_the_new_weight_in_the_next_call(
    way: str, mode: Callable[[], AbstractContextManager[object]]
) -> None:
    torch.manual_seed(0)
    model, x = Tied().eval(), torch.randn(3, 16)
    amp = fxamp.convert(model, dtype=BF16)
    with mode():
        before = [amp(x) for _ in range(3)][-1].clone()
    for time in range(2):
        WAYS[way](model)
        with mode():
            with autocast(BF16):
                expected = model(x)
            assert torch.equal(amp(x), expected)
            assert torch.equal(amp(x), expected)
        if not time and way != "a new parametrization":  # which gives the weight that there was
            assert not torch.equal(expected, before)


FROZEN_WAYS: dict[str, Callable[[Any, dict[str, Tensor]], Any]] = {
    "load_state_dict": lambda frozen, state: frozen.load_state_dict(state),
    "load_state_dict of rounded weights": lambda frozen, state: frozen.load_state_dict(
        {name: value.to(frozen.state_dict()[name].dtype) for name, value in state.items()}
    ),
    "load_state_dict, then to(device)": lambda frozen, state: (
        frozen.load_state_dict(state) and frozen.to("cpu")
    ),
}


@pytest.mark.parametrize("way", FROZEN_WAYS)
def test_a_frozen_module_has_the_new_weight_after_each_documented_way(way: str) -> None:
    torch.manual_seed(0)
    model, x = Tied().eval(), torch.randn(3, 16)
    frozen = fxamp.freeze(fxamp.convert(model, dtype=BF16), (x,))
    before = [frozen(x) for _ in range(3)][-1].clone()
    _loaded(model)
    FROZEN_WAYS[way](frozen, model.state_dict())
    with torch.no_grad(), autocast(BF16):
        expected = model(x)
    assert not torch.equal(expected, before)
    assert torch.equal(frozen(x), expected)
    assert torch.equal(frozen(x), expected)


@pytest.mark.parametrize("way", WAYS)
def test_a_frozen_module_does_not_follow_the_model_that_it_was_made_from(way: str) -> None:
    torch.manual_seed(0)
    model, x = Tied().eval(), torch.randn(3, 16)
    frozen = fxamp.freeze(fxamp.convert(model, dtype=BF16), (x,))
    before = frozen(x).clone()
    WAYS[way](model)
    assert torch.equal(frozen(x), before)
