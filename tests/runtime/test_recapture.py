"""A model is captured again only so often; what comes after that runs eagerly, and is right."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp
from tests.models import SmallCNN, autocast, equal

BF16 = torch.bfloat16


class Stepped(nn.Module):
    """Takes a number that changes on each call."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        self.scale = 1.0
        self.config = SimpleNamespace(power=1)

    def forward(self, x: Tensor, step: float = 0, options: dict[str, Any] | None = None) -> Tensor:
        """Uses it."""
        out: Tensor = self.body(x) ** self.config.power * (self.scale + step)
        return out + float((options or {}).get("rate", 0))


class Sized(nn.Module):
    """Needs a plain size, so each one is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Rows times their number."""
        return self.linear(x) * float(int(x.shape[0]))  # type: ignore[no-any-return]


def like_eager(model: nn.Module, amp: fxamp.AmpModule, *args: Any, **kwargs: Any) -> None:
    with autocast(BF16):
        expected = model(*args, **kwargs)
    for _ in range(2):
        assert equal(amp(*args, **kwargs), expected)


def limited(model: nn.Module, limit: int) -> fxamp.AmpModule:
    amp = fxamp.convert(model, dtype=BF16)
    amp.recapture_limit = limit
    return amp


def test_a_step_number_is_captured_a_few_times_and_then_runs_eagerly() -> None:
    model, x = Stepped(), torch.randn(2, 4)
    amp = limited(model, 3)
    for step in range(3):
        like_eager(model, amp, x, step)
    assert len(amp.graph_modules) == 3
    with pytest.warns(fxamp.RecaptureWarning, match=r"'step' is 3, not 2\n  pass a tensor") as caught:
        amp(x, 3)
    assert "recapture_limit = " in str(caught[0].message)
    for step in range(10):
        like_eager(model, amp, x, step)
    body = [gm for gm in amp.graph_modules if len(list(gm.parameters())) == 4]
    assert len(body) == 3 + 1, "what was captured stays, and the child has a program of its own"
    assert amp.eager_modules == ("",)
    assert len(amp._runner.failures) == len(amp._runner._surveyed) == 1
    assert amp(x, 1) is not None
    assert amp.graph_module in body


def test_raising_the_limit_lets_it_be_captured_again() -> None:
    model, x = Stepped(), torch.randn(2, 4)
    amp = limited(model, 1)
    like_eager(model, amp, x, 0)
    with pytest.warns(fxamp.RecaptureWarning):
        amp(x, 1)
    amp.recapture_limit = 2
    assert amp.recapture_limit == 2
    like_eager(model, amp, x, 1)
    assert amp.eager_modules == ()
    assert len(amp._runner.programs) == 2
    assert copy.deepcopy(amp).recapture_limit == 2
    with pytest.raises(fxamp.ArgumentError, match="at least 1"):
        amp.recapture_limit = 0


def test_modes_do_not_use_up_the_limit_of_each_other() -> None:
    model, x = Stepped(), torch.randn(2, 4)
    amp = limited(model, 1)
    for training in (True, False):
        model.train(training)
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                like_eager(model, amp, x)
    assert len(amp.graph_modules) == 4


def test_an_attribute_that_changes_on_each_call_is_named() -> None:
    model, x = Stepped(), torch.randn(2, 4)
    amp = limited(model, 2)
    for scale in (1.0, 2.0):
        model.scale = scale
        like_eager(model, amp, x)
    model.scale = 3.0
    with pytest.warns(fxamp.RecaptureWarning, match=r"the attribute 'scale' is 3.0, not 2.0\n  keep"):
        amp(x)
    for scale in (3.0, 4.0, 1.0):
        model.scale = scale
        like_eager(model, amp, x)
    assert len(amp._runner.programs) == 1


def test_a_size_that_is_needed_as_a_number_is_named() -> None:
    model = Sized()
    amp = limited(model, 2)
    for size in (3, 4):
        like_eager(model, amp, torch.randn(size, 4))
    with pytest.warns(fxamp.RecaptureWarning, match=r"x: \(5, 4\) break 'x.size\(0\) == 4'\n  pad"):
        amp(torch.randn(5, 4))
    for size in (6, 3, 4, 1):
        like_eager(model, amp, torch.randn(size, 4))


def test_a_structure_that_changes_without_end_is_named() -> None:
    model, x = Stepped(), torch.randn(2, 4)
    amp = limited(model, 2)
    for _ in range(2):
        model.body[0] = nn.Linear(4, 4)
        like_eager(model, amp, x)
    model.body[0] = nn.Linear(4, 4)
    with pytest.warns(
        fxamp.RecaptureWarning, match=r"the module 'body.0' is another\n  convert the model again"
    ):
        amp(x)
    like_eager(model, amp, x)


def test_kinds_of_calls_without_end_are_limited_too() -> None:
    class Summed(nn.Module):
        def forward(self, xs: list[Tensor]) -> Tensor:
            return torch.stack(xs).sum(0)

    model = Summed()
    amp = fxamp.convert(model, device_type="cpu", dtype=BF16)
    amp.recapture_limit = 1
    x = torch.randn(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for count in range(1, 12):
            like_eager(model, amp, [x.clone() for _ in range(count)])
    assert [one.category for one in caught] == [fxamp.RecaptureWarning]
    assert len(amp.graph_modules) == 8
    assert len(amp._runner.failures) == 1


def test_a_warning_turned_into_an_error_leaves_a_model_that_works() -> None:
    model, x = Stepped(), torch.randn(2, 4)
    amp = limited(model, 1)
    amp(x, 0)
    with pytest.raises(fxamp.RecaptureWarning):
        amp(x, 1)
    like_eager(model, amp, x, 1)


def test_calls_that_cannot_be_captured_are_tried_a_few_times_only() -> None:
    class Branch(Stepped):
        def forward(self, x: Tensor, step: float = 0, options: dict[str, Any] | None = None) -> Tensor:
            return super().forward(x, step) if random.random() >= 0 else self.body(x)

    model, x = Branch(), torch.randn(2, 4)
    amp = limited(model, 2)
    for step in range(2):
        like_eager(model, amp, x, step)
    with pytest.warns(fxamp.RecaptureWarning, match="'step' is 2, not 1"):
        amp(x, 2)
    for step in range(2, 6):
        like_eager(model, amp, x, step)
    assert len(amp._runner.failures) == 3


def _reasons(amp: fxamp.AmpModule) -> list[str]:
    return [recapture.reason for recapture in amp.report().recaptures]


CAUSES: list[tuple[str, Callable[[Any], object], tuple[Any, ...]]] = [
    ("the argument 'step' is 0.5, not 0", lambda m: None, (0.5, {"rate": 1})),
    ("the argument \"options['rate']\" is 2, not 1", lambda m: None, (0, {"rate": 2})),
    ("the argument 'options' has another structure", lambda m: None, (0, {})),
    ("the number of arguments differs", lambda m: None, ()),
    (
        "the attribute 'power' of 'config' is 2, not 1",
        lambda m: m.config.__setattr__("power", 2),
        (0, {"rate": 1}),
    ),
    ("the training flags changed", lambda m: m.eval(), (0, {"rate": 1})),
    ("the attribute 'scale' is True, not 1.0", lambda m: m.__setattr__("scale", True), (0, {"rate": 1})),
    (
        "the requires_grad of the tensor 'bias' is False, not True",
        lambda m: m.body[0].bias.requires_grad_(False),
        (0, {"rate": 1}),
    ),
    ("the module 'body.3' is new", lambda m: m.body.append(nn.ReLU()), (0, {"rate": 1})),
]


@pytest.mark.parametrize(("reason", "change", "args"), CAUSES, ids=[reason for reason, _, _ in CAUSES])
def test_the_report_says_why_a_model_was_captured_again(
    reason: str, change: Callable[[Any], object], args: tuple[Any, ...]
) -> None:
    model, x = Stepped(), torch.randn(2, 4)
    amp = fxamp.convert(model, dtype=BF16)
    amp(x, 0, {"rate": 1})
    assert _reasons(amp) == []
    change(model)
    amp(x, *args)
    assert _reasons(amp) == [reason]
    assert f"captured again: the model: {reason}" in str(amp.report())


def test_the_report_tells_modes_and_dtypes() -> None:
    amp, x = fxamp.convert(Stepped(), dtype=BF16), torch.randn(2, 4)
    amp(x)
    with torch.no_grad():
        amp(x)
    amp(x.half())
    assert _reasons(amp) == [
        "the gradient mode: now False, not True",
        "the dtype of input 0 is another: torch.float16, not torch.float32",
    ]


@pytest.mark.parametrize("make", [SmallCNN, lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 5))])
def test_after_the_first_epoch_nothing_is_captured(make: Callable[[], nn.Module]) -> None:
    model = make()
    amp = fxamp.convert(model, dtype=BF16)
    counts = []
    for _ in range(3):
        model.train()
        for size in (4, 4, 3, 1):
            amp(torch.randn(size, 3, 8, 8)).sum().backward()
        model.eval()
        with torch.no_grad():
            for size in (4, 2, 1, 0):
                like_eager(model, amp, torch.randn(size, 3, 8, 8))
        counts.append(len(amp.graph_modules))
    assert counts[0] == counts[1] == counts[2] <= 5
    assert amp.eager_modules == ()


def test_another_default_dtype_is_another_call() -> None:
    class Table(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            table = torch.arange(4) / 4
            return x + 1 if table.dtype is torch.float64 else x

    amp, x = fxamp.convert(Table(), dtype=BF16), torch.zeros(2, 4)
    found = [amp(x)[0, 0].item()]
    torch.set_default_dtype(torch.float64)
    try:
        found.append(amp(x)[0, 0].item())
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == [0.0, 1.0]
    assert _reasons(amp) == ["the default dtype changed"]
