"""Methods that are looked up on the source, and what code that inspects a model sees of a converted one."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import fxamp
from fxamp.runtime.amp_module import AmpModule
from tests.models import autocast, equal

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class _Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor, labels: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        out: Tensor = self.inner(x) * scale
        return out

    def twice(self, x: Tensor) -> Tensor:
        """What ``generate`` does: a call of itself, one of a child, an operator, state."""
        self.calls += 1
        return torch.mm(self(x) + self.inner(x), x.T)


class _Model(_Base):
    """A subclass whose methods need the class that they are in."""

    def twice(self, x: Tensor) -> Tensor:
        return super().twice(x)

    def by_name(self, x: Tensor) -> Tensor:
        method: Any = vars(_Model)["_by_name"] if type(self) is _Model else type(self)._by_name
        out: Tensor = method(self, x)
        return out

    def _by_name(self, x: Tensor) -> Tensor:
        out: Tensor = self(x)
        return out

    def frozen(self) -> _Model:
        self.requires_grad_(False)
        return self

    def outputs(self, x: Tensor) -> Iterator[Tensor]:
        yield self(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def _pair() -> tuple[_Model, AmpModule]:
    torch.manual_seed(0)
    plain = _Model()
    return plain, fxamp.convert(copy.deepcopy(plain), device_type="cpu", dtype=torch.bfloat16)


def test_a_method_gives_what_it_gives_under_eager_autocast() -> None:
    plain, amp = _pair()
    with autocast(torch.bfloat16):
        expected = plain.twice(X)
    assert equal(amp.twice(X), expected)
    assert amp.calls == 1
    assert not torch.is_autocast_enabled("cpu")


def test_a_method_that_calls_the_model_runs_what_was_captured() -> None:
    _, amp = _pair()
    assert amp.by_name(X).dtype is torch.bfloat16
    assert len(amp.graph_modules) == 1
    assert amp.eager_modules == ()
    (out,) = amp.outputs(X)
    assert out.dtype is torch.bfloat16


def test_a_method_that_returns_its_model_returns_the_converted_one() -> None:
    _, amp = _pair()
    assert amp.frozen() is amp
    assert not amp.inner.weight.requires_grad


def test_the_signature_is_the_sources() -> None:
    plain, amp = _pair()
    assert inspect.signature(amp.forward) == inspect.signature(plain.forward)
    assert inspect.signature(amp.twice) == inspect.signature(plain.twice)
    assert list(inspect.signature(AmpModule.forward).parameters) == ["self", "args", "kwargs"]

    def loss(one: Tensor, other: Tensor) -> Tensor:
        return one @ other

    converted = fxamp.convert(loss, device_type="cpu", dtype=torch.bfloat16)
    assert list(inspect.signature(converted.forward).parameters) == ["one", "other"]


def test_for_isinstance_it_is_of_both_classes() -> None:
    _, amp = _pair()
    assert isinstance(amp, AmpModule)
    assert isinstance(amp, _Model)
    assert amp.__class__ is _Model
    assert type(amp) is AmpModule
    assert repr(amp).startswith("AmpModule(\n  policy=")
    assert fxamp.convert(torch.mm, device_type="cpu", dtype=torch.bfloat16).__class__ is AmpModule
    for twin in (copy.copy(amp), copy.deepcopy(amp), pickle.loads(pickle.dumps(amp))):
        assert type(twin) is AmpModule
        assert equal(twin(X), amp(X))


def test_a_training_flag_that_is_set_by_hand_is_the_sources() -> None:
    source = _Model().eval()
    amp = fxamp.convert(source, device_type="cpu", dtype=torch.bfloat16)
    assert not source.training
    amp.training = True
    assert source.training


def test_it_loads_as_part_of_another_model() -> None:
    plain, amp = _pair()
    other = nn.Sequential(fxamp.convert(_Model(), device_type="cpu", dtype=torch.bfloat16))
    whole = nn.Sequential(plain)
    plain.calls = 5
    other.load_state_dict(whole.state_dict())
    assert other[0].calls == 5
    assert equal(other[0](X), amp(X))
