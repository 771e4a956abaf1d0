"""A program is run only while the attributes that it rests on are as they were."""

from __future__ import annotations

import copy
import dataclasses
import math
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import fxamp
from tests.models import autocast

BF16 = torch.bfloat16


class Kind(Enum):
    """What a model may be told to do."""

    PLUS = "plus"
    MINUS = "minus"


@dataclasses.dataclass
class Settings:
    """Settings as a plain object."""

    factor: float = 2.0
    offsets: list[int] = dataclasses.field(default_factory=lambda: [1, 2])


class Slotted:
    """Settings without a ``__dict__``."""

    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 2.0


def double(x: Tensor) -> Tensor:
    return x * 2


def halve(x: Tensor) -> Tensor:
    return x / 2


class Model(nn.Module):
    """Reads attributes of every sort."""

    of_the_class = 1.0
    mask: Tensor
    shift: nn.Parameter | None

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)
        self.register_parameter("shift", None)
        self.register_buffer("mask", torch.ones(4))
        self.scale, self.flag, self.name = 2.0, 1, "x"
        self.config, self.settings, self.slotted = SimpleNamespace(use=True, unread=1), Settings(), Slotted()
        self.sizes, self.nested, self.names = [1, 2], {"a": [1, 2]}, {"x"}
        self.ordered: dict[str, int] = {"one": 1, "two": 2}
        self.lookup: Any = defaultdict(int, a=1)
        self.dtype, self.kind, self.function = torch.float32, Kind.PLUS, double
        self.tensors, self.stray = [torch.ones(4)], [nn.Dropout(0.5)]
        self.counter = 0

    @property
    def slope(self) -> float:
        """Reads an attribute by way of a property."""
        return float(self.scale) * 0.5

    def extra(self, h: Tensor) -> Tensor:
        """A method that may be replaced."""
        return h + 1

    def forward(self, x: Tensor) -> Tensor:
        """Everything that can be read, read."""
        h: Tensor = self.dropout(self.linear(x)) * self.scale * self.slope
        h = h + 1 if self.flag is True else h - self.flag
        h = h * self.of_the_class * (3 if self.config.use else 5)
        h = h * self.settings.factor + self.settings.offsets[0] + self.slotted.factor
        h = h + self.sizes[-1] + self.nested["a"][0] + len(self.names) + self.lookup.get("a", 7)
        h = h * (2 if next(iter(self.ordered)) == "one" else 3)
        h = h.to(self.dtype) * (1 if self.kind is Kind.PLUS else -1)
        h = self.extra(self.function(h)) + self.tensors[0]
        if self.shift is not None:
            h = h + self.shift
        h = h * self.mask.shape[0] * getattr(self, "late", 1) + len(self.name)
        if hasattr(self, "other"):
            h = h.sin()
        return self.stray[0](h) * math.copysign(1.0, self.scale)  # type: ignore[no-any-return]


def agree(model: nn.Module, call: Callable[..., Tensor], *args: Tensor) -> None:
    """Three calls, since the second and third may take a shorter way than the first."""
    torch.manual_seed(0)
    with autocast(BF16):
        expected = model(*args)
    for _ in range(3):
        torch.manual_seed(0)
        found = call(*args)
        assert found.dtype is expected.dtype
        assert torch.equal(found, expected)


def _set(path: str, value: Any) -> Callable[[Any], None]:
    *owners, name = path.split(".")

    def change(model: Any) -> None:
        for owner in owners:
            model = getattr(model, owner)
        setattr(model, name, value)

    return change


CHANGES: dict[str, Callable[[Any], None]] = {
    "the rate of a dropout": _set("dropout.p", 0.25),
    "a float": _set("scale", 3.0),
    "a float of the other sign": _set("scale", -2.0),
    "a number of another class": _set("flag", True),
    "a string": _set("name", "longer"),
    "a dtype": _set("dtype", torch.float64),
    "a member of an enum": _set("kind", Kind.MINUS),
    "a function": _set("function", halve),
    "a setting": _set("config.use", False),
    "all settings": _set("config", SimpleNamespace(use=False)),
    "a field of a dataclass": _set("settings.factor", 0.5),
    "a list in a dataclass": lambda model: model.settings.offsets.insert(0, 9),
    "a slot": _set("slotted.factor", 0.5),
    "a longer list": lambda model: model.sizes.append(9),
    "an item of a list": lambda model: model.sizes.__setitem__(-1, 9),
    "an item deep inside": lambda model: model.nested["a"].__setitem__(0, 9),
    "a set": lambda model: model.names.add("y"),
    "the order of a dict": lambda model: model.ordered.update(one=model.ordered.pop("one")),
    "an item of a defaultdict that goes": lambda model: model.lookup.pop("a"),
    "a tensor in a list": lambda model: model.tensors.__setitem__(0, torch.zeros(4)),
    "a parameter that was none": _set("shift", nn.Parameter(torch.ones(4))),
    "the size of a buffer that is only asked for it": _set("mask", torch.ones(7)),
    "an attribute that was missing": _set("late", 3),
    "one that was asked for": _set("other", None),
    "one that hides the class's": _set("of_the_class", 3.0),
    "a method of the instance": _set("extra", double),
    "forward of a child": _set("linear.forward", double),
    "the mode of a module in a list": lambda model: model.stray[0].eval(),
    "a module in a list": lambda model: model.stray.__setitem__(0, nn.Tanh()),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_attribute_is_seen(what: str) -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(3, 4)
    amp = fxamp.convert(model, dtype=BF16)
    agree(model, amp, x)
    CHANGES[what](model)
    agree(model, amp, x)
    assert len(amp.graph_modules) == 2
    assert amp.eager_modules == ()


def test_an_attribute_of_the_class_is_seen() -> None:
    class Own(Model):
        of_the_class = 2.0

    model, x = Own(), torch.randn(3, 4)
    amp = fxamp.convert(model, dtype=BF16)
    agree(model, amp, x)
    Own.of_the_class = 5.0
    agree(model, amp, x)
    Own.extra = lambda self, h: h - 1  # type: ignore[method-assign]
    agree(model, amp, x)


def test_a_program_is_found_again_when_the_value_comes_back() -> None:
    model, x = Model(), torch.randn(3, 4)
    amp = fxamp.convert(model, dtype=BF16)
    for value in (0.5, 0.25, 0.0, 0.5, 0.25, 0.0):
        model.dropout.p = value
        agree(model, amp, x)
    assert len(amp.graph_modules) == 3


def test_what_forward_does_not_read_does_not_matter() -> None:
    model, x = Model(), torch.randn(3, 4)
    amp = fxamp.convert(model, dtype=BF16)
    for step in range(3):
        model.counter = step
        setattr(model, f"seen_{step}", step)
        model.linear.owner = object()  # type: ignore[assignment]
        agree(model, amp, x)
    assert len(amp.graph_modules) == 1


def test_an_equal_value_is_as_good() -> None:
    model, x = Model(), torch.randn(3, 4)
    model.scale = math.nan
    amp = fxamp.convert(model, dtype=BF16)
    amp(x)
    model.scale, model.sizes, model.name = float("nan"), [1, 2], "".join(["x"])
    model.nested, model.lookup = {"a": [1, 2]}, defaultdict(int, a=1)
    amp(x)
    assert len(amp.graph_modules) == 1


@pytest.mark.parametrize(("one", "other"), [(0, False), (0.0, 0), (0.0, -0.0), (1, 1.0), ((1,), (True,))])
def test_values_that_are_equal_but_not_alike_are_told_apart(one: object, other: object) -> None:
    class Told(nn.Module):
        value: Any = one

        def forward(self, x: Tensor) -> Tensor:
            return x * (len(repr(self.value)) + 1)

    model, x = Told(), torch.randn(3)
    amp = fxamp.convert(model, device_type="cpu", dtype=BF16)
    agree(model, amp, x)
    model.value = other
    agree(model, amp, x)
    assert len(amp.graph_modules) == 2


def test_the_dict_of_a_module_may_be_read_as_a_whole() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rate = 2.0

        def forward(self, x: Tensor) -> Tensor:
            return x * vars(self)["rate"]  # type: ignore[no-any-return]

    model, x = Whole(), torch.randn(3)
    amp = fxamp.convert(model, device_type="cpu", dtype=BF16)
    agree(model, amp, x)
    model.rate = 3.0
    agree(model, amp, x)


def test_a_module_in_a_closure_is_looked_after_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))

    def loss(x: Tensor) -> Tensor:
        out: Tensor = model(x)
        return out.float().square().mean()

    amp, x = fxamp.convert(loss, device_type="cpu", dtype=BF16), torch.randn(3, 4)
    changes: list[Callable[[], object]] = [
        model.eval,
        model.train,
        lambda: setattr(model[1], "p", 0.1),
        lambda: model.append(nn.Tanh()),
        lambda: model.__setitem__(0, nn.Linear(4, 4)),
        lambda: setattr(model[0], "weight", nn.Parameter(torch.randn(4, 4))),
        lambda: setattr(model[0], "bias", None),
    ]
    for change in changes:
        change()
        torch.manual_seed(0)
        with autocast(BF16):
            expected = loss(x)
        for _ in range(3):
            torch.manual_seed(0)
            assert torch.equal(amp(x), expected)


def test_modules_made_in_forward_leave_no_guard() -> None:
    class Made(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.Softmax(dim=-1)(x)  # type: ignore[no-any-return]

    model, x = Made(), torch.randn(3, 4)
    amp = fxamp.convert(model, device_type="cpu", dtype=BF16)
    agree(model, amp, x)
    assert len(amp.graph_modules) == 1


def test_a_cache_that_forward_fills_is_seen_empty_and_filled() -> None:
    class Cached(nn.Module):
        cache: Tensor | None = None

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.cache = None

        def forward(self, x: Tensor) -> Tensor:
            h: Tensor = self.linear(x)
            if self.cache is not None:
                h = h + self.cache
            self.cache = h.detach()
            return h

    model, x = Cached(), torch.randn(3, 4)
    amp = fxamp.convert(model, dtype=BF16)
    for size in (3, 3, 3):
        batch = x[:size]
        before = model.cache
        with autocast(BF16):
            expected = model(batch)
        model.cache = before
        assert torch.equal(amp(batch), expected)
    assert len(amp.graph_modules) == 2


def test_nothing_of_it_is_left_on_nn_module() -> None:
    fxamp.convert(Model(), (torch.randn(3, 4),), dtype=BF16)
    assert "__getattribute__" not in vars(nn.Module)

    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError(x.shape)

    with pytest.raises(KeyError):
        fxamp.convert(Broken(), device_type="cpu", dtype=BF16)(torch.ones(2))
    assert "__getattribute__" not in vars(nn.Module)


def test_another_thread_runs_modules_while_one_captures() -> None:
    other, x = Model().eval(), torch.randn(3, 4)
    other.stray[0].eval()  # no random numbers in the other threads
    expected, wrong, stop = other(x), [], threading.Event()

    def run() -> None:
        while not stop.is_set():
            other.counter += 1
            if not torch.equal(other(x), expected):
                wrong.append(1)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            model = Model()
            amp = fxamp.convert(model, dtype=BF16)
            agree(model, amp, x)
            agree(model, amp, x)
            assert len(amp.graph_modules) == 1
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong


class Small(nn.Module):
    """A model with a few things to change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)
        self.scale: float = 1
        self.config = SimpleNamespace(relu=True)
        self.powers = OrderedDict(one=1)

    def forward(self, x: Tensor) -> Tensor:
        """Reads them."""
        h: Tensor = self.dropout(self.linear(x)) * self.scale
        h = functional.relu(h) if self.config.relu else h
        return h ** len(self.powers)


steps = st.one_of(
    st.tuples(st.just("dropout.p"), st.sampled_from([0.0, 0.5])),
    st.tuples(st.just("scale"), st.sampled_from([1, True, 1.0, -0.0])),
    st.tuples(st.just("config.relu"), st.booleans()),
    st.tuples(st.just("powers"), st.sampled_from([OrderedDict(one=1), OrderedDict(one=1, two=2)])),
    st.tuples(st.just("training"), st.booleans()),
    st.tuples(st.just("dropout.training"), st.booleans()),
    st.tuples(st.just("linear.bias.requires_grad"), st.booleans()),
    st.tuples(st.just("call"), st.integers(0, 3)),
)


@settings(max_examples=15, deadline=None)
@given(st.lists(steps, min_size=3, max_size=12))
def test_any_sequence_of_changes_and_calls_is_as_eager(sequence: list[tuple[str, Any]]) -> None:
    torch.manual_seed(0)
    model = Small()
    amp = fxamp.convert(model, dtype=BF16)
    for what, value in [*sequence, ("call", 2)]:
        if what == "call":
            agree(model, amp, torch.randn(value, 4))
        else:
            _set(what, value)(model)
    assert amp.eager_modules == ()


def test_what_forward_writes_before_it_reads_is_not_guarded() -> None:
    class Resetting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(4, 4)
            self.state: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.state = None
            if self.state is None:
                self.state = self.f(x).detach()
            result: Tensor = self.state * 2
            return result

    model = Resetting()
    amp = fxamp.convert(model, dtype=BF16)
    for _ in range(4):
        x = torch.randn(2, 4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = copy.deepcopy(model)(x)
        assert torch.equal(amp(x), expected)
        assert model.state is not None
    assert amp.eager_modules == ()
    assert len(amp.graph_modules) <= 2
