"""Random programs that read values of tensors run as under eager autocast, to the bit, call after call.

A program is a list of steps on one tensor ``[rows, 8]`` and what earlier steps have kept; some steps read: a
number, a truth value, a selection, a list.  Each example is called on several inputs, so most calls take
ways that an earlier one has not taken.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fxamp
from tests.models import autocast
from tests.runtime.test_segments import difference, outcome

_WIDTH = 8


class Walker(nn.Module):
    """Runs steps, by their names."""

    ema: Tensor
    count: Tensor

    def __init__(self, steps: tuple[tuple[str, str], ...]) -> None:
        super().__init__()
        self.steps = steps
        self.a, self.b = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.norm, self.bn, self.drop = nn.LayerNorm(_WIDTH), nn.BatchNorm1d(_WIDTH), nn.Dropout(0.4)
        self.register_buffer("ema", torch.zeros(_WIDTH))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Any:
        """The last tensor, and the numbers that were read."""
        numbers: list[Any] = []
        kept = [x]
        for name, context in self.steps:
            with CONTEXTS[context]():
                x = STEPS[name](self, x, kept, numbers)
        return x, numbers


def _padded(x: Tensor) -> Tensor:
    """*x* with three rows at least, so that batch_norm can do with it."""
    return torch.cat([x, x.new_ones(3, _WIDTH)]) if x.shape[0] < 3 else x


def _read(numbers: list[Any], number: Any) -> Any:
    numbers.append(number)
    return number


def _keep(kept: list[Tensor], x: Tensor) -> Tensor:
    kept.append(x)
    return x


def _loop(m: Walker, x: Tensor) -> Tensor:
    for _ in range(int(x.float().nan_to_num().abs().mean().clamp(max=3).item())):
        x = m.drop(m.b(x))
    return x


def _remember(m: Walker, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.ema.mul_(0.9).add_(x.detach().float().mean(0))
        m.count += 1
    return x


def _rebind(m: Walker, x: Tensor) -> Tensor:
    m.ema = m.ema * 0.5 + x.detach().sum(0)
    return x + m.ema


def _assign(m: Walker, x: Tensor) -> Tensor:
    y = x.clone()
    y[y > 0] *= 0.5
    return y


def _bumped(m: Walker, x: Tensor) -> Tensor:
    with torch.no_grad():
        if m.ema.sum() > 0:
            m.b.weight.mul_(0.5)
    return x


def _experts(m: Walker, x: Tensor) -> Tensor:
    chosen = x.float().nan_to_num().argmax(1) % 2
    out = torch.zeros(x.shape[0], _WIDTH)
    for index, expert in enumerate((m.a, m.b)):
        (row,) = torch.where(chosen == index)
        out = out.index_add(0, row, expert(x[row]).float())
    return out


# fmt: off
STEPS: Mapping[str, Callable[[Walker, Tensor, list[Tensor], list[Any]], Tensor]] = MappingProxyType({
    "linear": lambda m, x, kept, n: m.a(x),
    "shared": lambda m, x, kept, n: m.b(x) + m.b(x * 2),
    "norm": lambda m, x, kept, n: m.norm(x.float()),
    "batch_norm": lambda m, x, kept, n: m.bn(_padded(x).float()),
    "dropout": lambda m, x, kept, n: m.drop(x),
    "relu": lambda m, x, kept, n: x.relu(),
    "tanh": lambda m, x, kept, n: x.tanh(),
    "exp": lambda m, x, kept, n: x.clamp(max=3).exp(),
    "keep": lambda m, x, kept, n: _keep(kept, x),
    "add_kept": lambda m, x, kept, n: x + kept[-1].mean(0),
    "drop_kept": lambda m, x, kept, n: (kept.pop() * 0 if len(kept) > 1 else x).sum() * 0 + x,
    "remember": lambda m, x, kept, n: _remember(m, x),
    "rebind": lambda m, x, kept, n: _rebind(m, x),
    "in_place": lambda m, x, kept, n: x.clone().mul_(2),
    "branch": lambda m, x, kept, n: m.a(x) if x.sum() > 0 else m.b(x),
    "branch_on_item": lambda m, x, kept, n: x * 2 if _read(n, x.float().mean().item()) > 0 else m.b(x),
    "branch_on_state": lambda m, x, kept, n: m.a(x) if m.count > 1 else x,
    "scale": lambda m, x, kept, n: x * (x.float().abs().nan_to_num().mean().item() * 0.1 + 0.3),
    "use_number": lambda m, x, kept, n: x * n[-1] if n else x,
    "count": lambda m, x, kept, n: x + _read(n, (x > 0).sum().item()),
    "index": lambda m, x, kept, n: x * (1 + _read(n, int(x.float().nan_to_num().sum(0).argmax()))),
    "select": lambda m, x, kept, n: x[x[:, 0] > 0],
    "nonzero": lambda m, x, kept, n: m.b(x)[(x[:, 0] > 0).nonzero()[:, 0]],
    "assign": lambda m, x, kept, n: _assign(m, x),
    "loop": lambda m, x, kept, n: _loop(m, x),
    "list": lambda m, x, kept, n: x * sum(x[:, 0].float().nan_to_num().tolist()),
    "layer_drop": lambda m, x, kept, n: m.a(x) if torch.rand([]) < 0.5 else x,
    "unless_empty": lambda m, x, kept, n: m.a(x) if len(x) else x.new_ones(2, _WIDTH),
    "weight": lambda m, x, kept, n: _bumped(m, x),
    "experts": lambda m, x, kept, n: _experts(m, x),
    "unique": lambda m, x, kept, n: x * F.relu(x).float().nan_to_num().clamp(max=9).long().unique().shape[0],
})
CONTEXTS: Mapping[str, Callable[[], Any]] = MappingProxyType({
    "": nullcontext,
    "off": lambda: torch.autocast("cpu", enabled=False),
    "no_grad": torch.no_grad,
})
# fmt: on


def _programs() -> st.SearchStrategy[tuple[tuple[str, str], ...]]:
    context = st.sampled_from(("", "", "", "", "", "", "off", "no_grad"))
    step = st.tuples(st.sampled_from(sorted(STEPS)), context)
    return st.lists(step, min_size=2, max_size=9).map(tuple)


def check(
    steps: tuple[tuple[str, str], ...], dtype: torch.dtype, seed: int, *, grad: bool, training: bool
) -> None:
    """Compare a few calls of one program."""
    torch.manual_seed(seed)
    theirs = Walker(steps).train(training)
    ours = copy.deepcopy(theirs)
    amp = fxamp.convert(ours, device_type="cpu", dtype=dtype)
    for number, rows in enumerate((4, 4, 4, 2, 4)):
        x = torch.randn(rows, _WIDTH, generator=torch.Generator().manual_seed(seed + number))
        mode = torch.set_grad_enabled(grad)
        with mode:
            expected = outcome(theirs, theirs, (x.clone(),), autocast(dtype), number)
        with torch.set_grad_enabled(grad):
            found = outcome(ours, amp, (x.clone(),), nullcontext(), number)
        note(f"call {number}: {expected['error']}; {amp.report().eager}")
        if expected["error"] is not None:
            assert found["error"] is not None
            assert found["error"][0] is expected["error"][0]
            return
        assert difference(found, expected, f"call {number}") == ""


_EXAMPLES = int(os.environ.get("FXAMP_EXAMPLES", "500"))
_CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large]


def _checked(most: int, **options: Any) -> Callable[..., Any]:
    def decorate(test: Callable[..., Any]) -> Any:
        drawn = given(
            _programs(),
            st.sampled_from((torch.bfloat16, torch.float16)),
            st.integers(0, 2**16),
            st.booleans(),
            st.booleans(),
        )
        checked = settings(max_examples=most, deadline=None, suppress_health_check=_CHECKS, **options)
        return checked(drawn(test))

    return decorate


@_checked(25, derandomize=True, database=None)
def test_random_programs_that_read_run_as_under_eager_autocast(
    steps: Any, dtype: torch.dtype, seed: int, grad: bool, training: bool
) -> None:
    check(steps, dtype, seed, grad=grad, training=training)


@pytest.mark.slow
@_checked(_EXAMPLES, print_blob=True)
def test_many_random_programs_that_read_run_as_under_eager_autocast(
    steps: Any, dtype: torch.dtype, seed: int, grad: bool, training: bool
) -> None:
    check(steps, dtype, seed, grad=grad, training=training)
