"""Random programs that compute with weights, constants and tables, and mix an input in here and there.

A program is a list of steps over a pool of tensors, which begins with the input and weights; a step takes two
of them, brings each to ``[8, 8]`` and puts its result back.  ``differ`` runs one under eager autocast and
frozen, several times; between the calls it writes to the results and changes the weights.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import fxamp
from tests.models import equal

__all__ = ["OPERATORS", "WeightProgram", "differ", "weight_programs"]

_SIDE = 8
_DOUBLED = torch.tensor([0, 3, 3, 1, 7, 0, 2, 5])


@dataclass(frozen=True)
class WeightProgram:
    """What a module does.

    Attributes:
        steps: An operator and two places in the pool, counted from its end, each.
        returned: Which tensors of the pool it returns, besides the last one with the input added.
    """

    steps: tuple[tuple[str, int, int], ...]
    returned: tuple[int, ...] = ()


class Model(nn.Module):
    """A module whose ``forward`` runs a program."""

    buffer: Tensor

    def __init__(self, program: WeightProgram) -> None:
        super().__init__()
        self.program = program
        self.w = nn.Parameter(torch.randn(_SIDE, _SIDE))
        self.v = nn.Parameter(torch.randn(_SIDE, _SIDE).t())
        self.linear = nn.Linear(_SIDE, _SIDE)
        self.register_buffer("buffer", torch.randn(_SIDE, _SIDE))

    def forward(self, x: Tensor) -> list[Tensor]:
        """Run the program on *x*, ``(8, 8)``."""
        pool = [self.buffer, x, self.v, self.w]
        for name, a, b in self.program.steps:
            one, other = (_square(pool[-1 - place % len(pool)]) for place in (a, b))
            pool.append(OPERATORS[name](self, one, other))
        return [_square(pool[-1]) + x, *(pool[-1 - place % len(pool)] for place in self.program.returned)]


def _square(x: Tensor) -> Tensor:
    if x.shape == (_SIDE, _SIDE):
        return x
    flat = x.reshape(-1)[: _SIDE * _SIDE]
    return torch.cat([flat, flat.new_zeros(_SIDE * _SIDE - flat.shape[0])]).view(_SIDE, _SIDE)


def _own(m: Model, x: Tensor) -> Tensor:
    """*x* itself, which a write may reach although others see it too; a copy of a weight or of a view."""
    return x.clone() if x is m.w or x is m.v or x is m.buffer or x._is_view() else x


# fmt: off
OPERATORS: Mapping[str, Callable[[Model, Tensor, Tensor], Tensor]] = MappingProxyType({
    "add": lambda m, a, b: a + b,
    "mul": lambda m, a, b: a * b,
    "double": lambda m, a, b: a * 2.0,
    "triple": lambda m, a, b: a * 3.0,
    "exp": lambda m, a, b: a.clamp(max=2).exp(),
    "mean": lambda m, a, b: a - a.float().mean(1, keepdim=True),
    "matmul": lambda m, a, b: a.float() @ b.float(),
    "linear": lambda m, a, b: m.linear(a.float()),
    "bf16": lambda m, a, b: a.bfloat16(),
    "f32": lambda m, a, b: a.float(),
    "standardised": lambda m, a, b: torch.batch_norm(
        a.float().reshape(1, 8, -1), None, None, None, None, True, 0.0, 1e-5, False),
    "table": lambda m, a, b: torch.arange(8, dtype=torch.float32).unsqueeze(0) * torch.ones(8, 1),
    "literal": lambda m, a, b: torch.tensor([1.5, 2.5]).repeat(32),
    "transpose": lambda m, a, b: a.t(),
    "packed": lambda m, a, b: a.t().contiguous(),
    "rows": lambda m, a, b: a[2:6],
    "columns": lambda m, a, b: a[:, ::2],
    "cat": lambda m, a, b: torch.cat([a[:4], b[4:].to(a.dtype)]),
    "halves": lambda m, a, b: torch.cat(a.chunk(2, 1)[::-1], 1),
    "gather": lambda m, a, b: a[_DOUBLED],
    "sorted": lambda m, a, b: a.sort(1).values,
    "clone": lambda m, a, b: a.clone(),
    "noise": lambda m, a, b: torch.rand_like(a.float()) + a,
    "dropped": lambda m, a, b: nn.functional.dropout(a.float(), 0.5, training=True),
    "mul_": lambda m, a, b: _own(m, a).mul_(1.5),
    "add_": lambda m, a, b: _own(m, a).add_(b),
    "row_": lambda m, a, b: (made := _own(m, a), made[0].add_(1))[0],
    "copy_": lambda m, a, b: _own(m, a).copy_(b),
    "tril_": lambda m, a, b: _own(m, a).tril_(),
    "with_x": lambda m, a, b: a * b.float().cos() + m.buffer,
})
# fmt: on


def weight_programs() -> st.SearchStrategy[WeightProgram]:
    """Programs of up to ten steps."""
    place = st.sampled_from((0, 0, 0, 1, 1, 2, 3, 4))
    step = st.tuples(st.sampled_from(sorted(OPERATORS)), place, place)
    steps = st.lists(step, min_size=1, max_size=10).map(tuple)
    return st.builds(WeightProgram, steps, st.lists(st.integers(0, 6), max_size=2).map(tuple))


def differ(program: WeightProgram) -> list[str]:
    """What eager autocast and the frozen model give differently."""
    torch.manual_seed(0)
    model, x = Model(program).eval(), torch.randn(_SIDE, _SIDE)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        expected = _outcome(torch.autocast("cpu", torch.bfloat16)(model.__call__), x)
        try:
            frozen = fxamp.freeze(fxamp.convert(copy.deepcopy(model), dtype=torch.bfloat16), (x.clone(),))
        except Exception as error:
            if isinstance(expected, Exception):
                return []
            raise AssertionError("freezing raises, and eager autocast does not") from error
        for call in range(4):
            expected = _outcome(torch.autocast("cpu", torch.bfloat16)(model.__call__), x)
            found = _outcome(frozen, x)
            if isinstance(expected, Exception) or isinstance(found, Exception):
                same = type(expected) is type(found)
                return [] if same else [f"{expected!r}, and frozen {found!r}"]
            if not all(map(equal, expected, found)):
                return [f"call {call}: other bits"]
            if frozen.eager_modules:
                return [f"left eager: {piece}" for piece in frozen.report().eager]
            _change(model, frozen, expected, found, call)
    return []


def _outcome(call: Callable[[Tensor], Any], x: Tensor) -> Any:
    torch.manual_seed(7)
    try:
        return call(x.clone())
    except Exception as error:  # noqa: BLE001  the error is what came of it
        return error


def _change(model: nn.Module, frozen: nn.Module, expected: Any, found: Any, call: int) -> None:
    """Write to what both gave and to the buffers of both, or to the weights of both."""
    if call % 2 == 0:
        for buffer in (*model.buffers(), *frozen.buffers()):
            buffer.mul_(1.1)
        memories = {weight.untyped_storage().data_ptr() for weight in model.state_dict().values()}
        for one, other in zip(expected, found, strict=True):
            if one.untyped_storage().data_ptr() not in memories:
                one.mul_(2)
                other.mul_(2)
        return
    state = {name: value * 1.25 + 0.1 for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    frozen.load_state_dict(state)
