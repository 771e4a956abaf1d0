"""What cannot be captured runs eagerly, and still nothing differs: not the first call, not shared weights."""

from __future__ import annotations

import copy
import random
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp
from fxamp.runtime import build_program as program_module
from tests.models import autocast, equal, run


class SharesWithEagerCode(nn.Module):
    """A draw of Python's keeps it eager; it uses its child's weight after it has called the child."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """A tensor ``(rows, 4)``."""
        h: Tensor = self.f(x) + nn.functional.linear(x * 2, self.f.weight)
        return h if random.random() > 1 else self.g(h)


def _compare_calls(model: nn.Module, args: tuple[Any, ...], *, example: bool) -> fxamp.AmpModule:
    ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
    amp = fxamp.convert(ours, args if example else None, device_type="cpu", dtype=torch.bfloat16)
    for _ in range(3):
        expected = run(theirs, theirs, args, {}, autocast(torch.bfloat16))
        found = run(ours, amp, args, {}, nullcontext())
        assert all(
            equal(one, other) for one, other in zip(found["outputs"], expected["outputs"], strict=True)
        )
        for name, grad in found["gradients"].items():
            assert equal(grad, expected["gradients"][name]), name
    return amp


@pytest.mark.parametrize("example", [False, True])
def test_a_weight_that_eager_code_uses_too_has_eagers_gradient_from_the_first_call(example: bool) -> None:
    amp = _compare_calls(SharesWithEagerCode(), (torch.randn(3, 4),), example=example)
    assert amp.eager_modules == ("", "f")
    assert any("uses its weights too" in piece.reason for piece in amp.report().eager)
    assert len(amp.graph_modules) >= 1


@pytest.mark.parametrize("example", [False, True])
def test_an_argument_that_cannot_be_taken_apart_makes_the_call_eager(example: bool) -> None:
    class TakesAnObject(SharesWithEagerCode):
        def forward(self, x: Any) -> Tensor:
            return super().forward(x.tensor)

    amp = _compare_calls(TakesAnObject(), (SimpleNamespace(tensor=torch.randn(3, 4)),), example=example)
    assert any("take apart" in piece.reason for piece in amp.report().eager)


def test_a_changed_setting_of_an_object_argument_is_seen() -> None:
    def scaled(x: Tensor, config: SimpleNamespace) -> Tensor:
        scale: float = config.scale
        return x @ x.t() * scale

    amp = fxamp.convert(scaled, device_type="cpu", dtype=torch.bfloat16)
    config, x = SimpleNamespace(scale=1.0), torch.ones(2, 2)
    assert amp(x, config)[0, 0] == 2
    config.scale = 3.0
    assert amp(x, config)[0, 0] == 6


def test_dynamic_shapes_are_those_of_torch_export() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return x @ y

    amp = fxamp.convert(
        f, device_type="cpu", dtype=torch.bfloat16, dynamic_shapes={"x": {0: torch.export.Dim.AUTO}}
    )
    for rows in (2, 3, 5):
        amp(torch.ones(rows, 4), torch.ones(4, 4))
    assert len(amp.graph_modules) == 1
    fixed = fxamp.convert(f, device_type="cpu", dtype=torch.bfloat16, dynamic_shapes=False)
    for rows in (2, 3, 5):
        fixed(torch.ones(rows, 4), torch.ones(4, 4))
    assert len(fixed.graph_modules) == 3


@pytest.mark.parametrize("shapes", [{"z": None}, (None,), {"x": {7: torch.export.Dim.AUTO}}])
def test_dynamic_shapes_that_do_not_fit_are_refused(shapes: Any) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return x @ y

    with pytest.raises(fxamp.ArgumentError, match="dynamic_shapes"):
        fxamp.convert(f, (torch.ones(2, 2), torch.ones(2, 2)), device_type="cpu", dynamic_shapes=shapes)


def test_an_attribute_set_on_the_converted_model_is_set_on_the_source() -> None:
    model = SharesWithEagerCode()
    amp = fxamp.convert(model, dtype=torch.bfloat16)
    amp.scale = 3.0
    amp.g = nn.Identity()
    assert model.scale == 3.0
    assert isinstance(model.g, nn.Identity)


def test_many_different_arguments_do_not_fill_the_memory() -> None:
    amp = fxamp.convert(lambda x, scale: x * scale, device_type="cpu", dtype=torch.bfloat16)
    for scale in range(16):
        assert amp(torch.ones(2), float(scale))[0] == scale
    with pytest.warns(fxamp.RecaptureWarning, match="the argument 'scale' is 16.0, not 15.0"):
        assert amp(torch.ones(2), 16.0)[0] == 16.0
    for scale in range(70):
        assert amp(torch.ones(2), float(scale))[0] == scale
    assert len(amp.graph_modules) == 16


def test_a_fault_of_fxamp_warns_and_the_model_runs_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise KeyError("planted")

    monkeypatch.setattr(program_module, "lower", broken)
    model = nn.Linear(4, 4)
    amp = fxamp.convert(model, dtype=torch.bfloat16)
    x = torch.randn(2, 4)
    with pytest.warns(UserWarning, match="a fault of fxamp: KeyError"):
        found = amp(x)
    with autocast(torch.bfloat16):
        assert equal(found, model(x))


def test_what_a_first_call_sets_does_not_keep_a_model_eager() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(4, 4)
            self.scale: float | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.scale is None:
                self.scale = 2.0 if x.shape[1] == 4 else 1.0
            result: Tensor = self.f(x) * self.scale
            return result

    amp = _compare_calls(Lazy(), (torch.randn(3, 4),), example=False)
    assert amp.eager_modules == ()
    assert len(amp.graph_modules) >= 1


def test_captures_without_a_call_do_not_use_up_the_second_try() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(4, 4)
            self.cache: dict[str, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            if "scale" not in self.cache:
                self.cache["scale"] = torch.ones(4)
            result: Tensor = self.f(x) * self.cache["scale"]
            return result

    x = torch.randn(3, 4)
    amp = fxamp.convert(Lazy(), dtype=torch.bfloat16)
    amp.capture(x)
    amp.capture(x)
    assert "" in amp.eager_modules
    amp(x)
    amp(x)
    assert amp.eager_modules == ()


class Chooses(nn.Module):
    """A branch of ``torch.cond``, for which eager mode asks Dynamo, is a child module."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """A tensor ``(rows, 4)``."""
        chosen: Tensor = torch.cond(x.sum() > 0, self.f, self.g, (x,))
        return chosen


@pytest.mark.parametrize("grad", [False, True])
def test_a_model_that_asks_dynamo_itself_runs_as_it_is(grad: bool) -> None:
    model, x = Chooses(), torch.ones(3, 4)
    with torch.set_grad_enabled(grad):
        with torch.autocast("cpu", torch.bfloat16):
            expected = model(x)
        assert torch.equal(fxamp.convert(model, device_type="cpu", dtype=torch.bfloat16)(x), expected)
