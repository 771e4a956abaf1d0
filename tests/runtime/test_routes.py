"""Calls that read values and go the way of the call before are one function, and like eager all the same."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import fxamp
from fxamp.runtime import runner as runner_module
from fxamp.runtime.route import Route
from fxamp.runtime.walk import Walk
from tests.counts import Counts
from tests.live_bytes import LiveBytes
from tests.models import autocast, equal

_WIDTH = 8
_LOW = torch.bfloat16


class Ways(nn.Module):
    """Goes on in one of two ways at each read, by the signs of ``x[0]``."""

    seen: Tensor

    def __init__(self, reads: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(reads + 1))
        self.norm, self.drop = nn.BatchNorm1d(_WIDTH), nn.Dropout(0.3)
        self.scale = 2.0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """A layer for each read, and one behind them."""
        h = self.norm(x)
        for index, layer in enumerate(self.layers[:-1]):
            h = self.drop(layer(h))
            self.seen += 1
            h = h * self.scale if x[0, index] > 0 else h.relu() + index
        last: Tensor = self.layers[-1](h)
        return last


class Pair:
    """A model under eager autocast, and its twin, converted or frozen."""

    def __init__(self, model: nn.Module, *, frozen: bool = False) -> None:
        self.theirs, self.ours = model, copy.deepcopy(model)
        self.amp = fxamp.convert(self.ours, device_type="cpu", dtype=_LOW)
        self.called: Any = fxamp.freeze(self.amp, (rows([]),)) if frozen else self.amp
        self.number = 0

    def call(self, x: Tensor) -> None:
        """Call both, and compare all that they do."""
        self.number += 1
        found, now = self._outcome(self.called, x)
        with autocast(_LOW):
            expected, then = self._outcome(self.theirs, x)
        assert equal(found, expected)
        assert torch.equal(now, then)
        if self.called is self.amp:
            buffers = zip(self.ours.buffers(), self.theirs.buffers(), strict=True)
            assert all(equal(one, other) for one, other in buffers)

    def _outcome(self, model: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(self.number)
        random.seed(self.number)
        return model(x.clone()), torch.get_rng_state()

    @property
    def routes(self) -> list[Route]:
        """Those that calls may take now."""
        runner = self.called._runner
        return [each.current for each in runner._routes.values() if each.current is not None]


def rows(signs: Sequence[bool], seed: int = 0) -> Tensor:
    x = torch.randn(4, _WIDTH, generator=torch.Generator().manual_seed(seed))
    x[0, : len(signs)] = torch.tensor([1.0 if sign else -1.0 for sign in signs])
    return x


@contextmanager
def walks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Walk]]:
    """The walks that were begun inside."""
    begun: list[Walk] = []

    class Noted(Walk):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            begun.append(self)

    with monkeypatch.context() as patched:
        patched.setattr(runner_module, "Walk", Noted)
        yield begun


_signs = st.tuples(st.booleans(), st.booleans(), st.booleans())


@pytest.mark.parametrize("frozen", [False, True])
@torch.no_grad()
def test_a_call_that_goes_the_way_of_the_call_before_needs_no_walk(
    monkeypatch: pytest.MonkeyPatch, frozen: bool
) -> None:
    pair = Pair(Ways().eval(), frozen=frozen)
    pair.call(rows([True, False, True]))
    pair.call(rows([True, False, True], seed=1))
    assert len(pair.routes) == 1
    with walks(monkeypatch) as begun:
        for seed in range(5):
            pair.call(rows([True, False, True], seed=seed))
        assert begun == []
        pair.call(rows([True, False, False], seed=1))
        assert len(begun) == 1


@cache
def _shared(kind: str) -> Pair:
    """One pair for all examples of a test: what was captured, and the routes, are those that others left."""
    return Pair(Ways().train(kind == "training"), frozen=kind == "frozen")


@pytest.mark.parametrize("kind", ["training", "evaluation", "frozen"])
@settings(max_examples=25, deadline=None)
@given(ways=st.lists(_signs, min_size=1, max_size=14))
def test_calls_on_any_ways_are_like_eager(kind: str, ways: list[tuple[bool, ...]]) -> None:
    pair = _shared(kind)
    with torch.no_grad():
        for seed, signs in enumerate([*ways, *ways[:1] * 3, *ways]):
            pair.call(rows(signs, seed))


@pytest.mark.parametrize("at", [0, 1, 2])
@torch.no_grad()
def test_no_operator_runs_twice_in_a_call_that_leaves_its_route(at: int) -> None:
    class Counting(TorchDispatchMode):
        names: list[str]

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if type(args[0]) is Tensor and func.name().partition(".")[0] in ("aten::addmm", "aten::relu"):
                self.names.append(func.name())
            return func(*args, **(kwargs or {}))

    def counted(call: Callable[[Tensor], Tensor], x: Tensor) -> list[str]:
        counting = Counting()  # type: ignore[no-untyped-call]
        counting.names = []
        with counting:
            call(x)
        return counting.names

    pair = Pair(Ways().eval())
    for seed in range(3):
        pair.call(rows([True, True, True], seed))
    other = rows([index != at for index in range(3)], 7)
    pair.call(other)
    found = counted(pair.amp, other)
    with autocast(_LOW):
        assert found == counted(pair.theirs, other)


def test_what_a_call_has_done_on_its_route_is_taken_back_where_it_has_to_begin_again() -> None:
    class Sometimes(Ways):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            if h.isnan().any() or x[0, 3] > 0:
                h = h * random.random()  # cannot be captured
            return functional.dropout(h, 0.3, self.training)

    pair = Pair(Sometimes().train())
    with torch.no_grad():
        for seed in range(4):
            pair.call(rows([True, False, True, False], seed))
        assert pair.routes
        pair.call(rows([True, False, True, True], 9))
    assert "draws from Python's" in pair.amp.report().eager[0].reason


def test_an_error_on_a_route_is_the_models_own_and_the_route_goes_on() -> None:
    class Picks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(_WIDTH, _WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            h: Tensor = self.layer(x)
            return h[h.argmax() * 0 + x.argmax()] if x.sum() > 0 else h

    pair = Pair(Picks())
    with torch.no_grad():
        for seed in range(4):
            x = rows([], seed).abs()
            x[0, 1] = 9.0
            pair.call(x)
        x[0, 7] = 99.0
        with pytest.raises(IndexError) as expected, autocast(_LOW):
            pair.theirs(x)
        with pytest.raises(IndexError) as found:
            pair.amp(x)
        assert str(found.value) == str(expected.value)
        x[0, 7] = 0.0
        pair.call(x)


@torch.no_grad()
def test_an_attribute_that_only_a_later_segment_reads_is_looked_at() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(_WIDTH, _WIDTH), 1.0

        def forward(self, x: Tensor) -> Tensor:
            h: Tensor = self.layer(x)
            return h * self.scale if x[0, 0] > 0 else h

    pair = Pair(Late())
    for scale in (1.0, 1.0, 1.0, 3.0, 3.0, 1.0, 1.0, float("1.0"), 5.0):
        for model in (pair.ours, pair.theirs):
            vars(model)["scale"] = scale
        pair.call(rows([True]))


@torch.no_grad()
def test_a_weight_that_only_a_later_segment_reads_may_be_replaced() -> None:
    pair = Pair(Ways().eval())
    for seed in range(4):
        pair.call(rows([True, True, True], seed))
    for model in (pair.ours, pair.theirs):
        layer = model.get_submodule("layers.3")
        layer.weight = nn.Parameter(torch.full((_WIDTH, _WIDTH), 0.1))
    pair.call(rows([True, True, True], 8))
    for model in (pair.ours, pair.theirs):
        model.get_submodule("layers.3").weight.data = torch.ones(2, _WIDTH)
        model.get_submodule("layers.3").bias.data = torch.ones(2)
    pair.call(rows([True, True, True], 9))


@torch.no_grad()
def test_a_route_that_calls_keep_leaving_gives_way_to_theirs() -> None:
    pair = Pair(Ways().eval())
    for seed in range(3):
        pair.call(rows([True, True, True], seed))
    first = pair.routes
    for seed in range(12):
        pair.call(rows([True, True, False], seed))
    assert pair.routes != first


@torch.no_grad()
def test_weights_are_cast_once_in_a_call_with_or_without_a_route() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(_WIDTH, _WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            h: Tensor = self.layer(x)
            return functional.relu(self.layer(h)) if x[0, 0] > 0 else h

    pair = Pair(Twice())
    for seed in range(4):
        pair.call(rows([True], seed))
    with Counts(pair.ours.parameters()) as ours:
        pair.amp(rows([True]))
    with Counts(pair.theirs.parameters()) as theirs, autocast(_LOW):
        pair.theirs(rows([True]))
    assert ours.casts == theirs.casts == 3
    assert ours.weight_casts == theirs.weight_casts == 2


def test_gradients_of_calls_on_a_route_are_those_of_eager() -> None:
    pair = Pair(Ways().train())
    for seed in range(6):
        x = rows([True, seed % 3 != 2, True], seed)
        torch.manual_seed(seed)
        pair.amp(x).sum().backward()
        torch.manual_seed(seed)
        with autocast(_LOW):
            loss = pair.theirs(x).sum()
        loss.backward()
        grads = zip(pair.ours.parameters(), pair.theirs.parameters(), strict=True)
        assert all(equal(one.grad, other.grad) for one, other in grads)


@torch.no_grad()
def test_an_ambient_region_does_not_reach_a_route() -> None:
    pair = Pair(Ways().eval())
    for seed in range(3):
        pair.call(rows([True, True, True], seed))
    x = rows([True, True, True])
    with autocast(torch.float16):
        found = pair.amp(x)
    assert equal(found, pair.amp(x))
    assert found.dtype is _LOW


def test_the_text_of_a_route_is_its_segments_and_the_tests_between_them() -> None:
    pair = Pair(Ways(reads=1).eval())
    with torch.no_grad():
        for seed in range(3):
            pair.call(rows([True], seed))
    (route,) = pair.routes
    lines = [line.strip() for line in route.text.splitlines()]
    assert lines[0] == "def run(x, t, call, held):"
    assert lines[lines.index("given = [v0]") :][1:4] == [
        "undo.save((t[6],))",
        "(v1, v2, v3) = segment0(given, t)",
        "a0 = operator0([v3], ())[0]",
    ]
    assert "if not (type(v4) is bool): return left(0, [v0, v1, v2, v3], n, undo, a0)" in lines
    assert lines[-3:] == ["given = [v1]", "del v0, v1, v2, v3, v4", "return last(given, t, call)"]
    assert not any("undo.save" in line and "t[2]" in line for line in lines)  # statistics that are only read


@torch.no_grad()
def test_a_model_that_reads_values_holds_no_more_memory_than_under_eager_autocast() -> None:
    class Checks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(4)))

        def forward(self, x: Tensor) -> Tensor:
            h = x * 2
            if h.sum() > -1e9:
                h = h + 1
            for layer in self.layers:
                h = layer(h).float().relu()
            return h

    def peak(call: Callable[[Tensor], Tensor], x: Tensor) -> int:
        with LiveBytes() as live:
            call(x)
        bytes_at_most: int = live.peak
        return bytes_at_most

    pair, x = Pair(Checks(), frozen=True), torch.randn(512, _WIDTH)
    for _ in range(3):
        pair.call(x)
    assert pair.routes
    found = peak(pair.called, x)
    with autocast(_LOW):
        assert found <= peak(pair.theirs, x)
