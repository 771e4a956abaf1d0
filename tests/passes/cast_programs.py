"""Random programs full of casts, movement and writes, and what they give with chosen clean-up passes.

A program is a list of steps over a pool of tensors, which begins with the inputs; a step takes two of them,
brings each to ``[8, 32]`` and puts its result back.  ``agrees`` runs one under eager autocast and converted,
with one clean-up pass in the pipeline and no other, and compares results, what was written to the inputs,
gradients and buffers to the bit.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import strategies as st
from torch import Tensor, nn

import fxamp
from fxamp.capture.segments import Captured
from fxamp.passes import build_pipeline
from fxamp.passes.base import Pass
from fxamp.passes.clean_up import CleanUp
from fxamp.policy import Policy
from tests.conformance.comparison import Outcome, differences

__all__ = ["CastProgram", "Step", "cast_programs", "differ"]

_ROWS, _WIDTH = 8, 32
_MODES: Mapping[str, Callable[[], AbstractContextManager[object]]] = MappingProxyType(
    {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
)


@dataclass(frozen=True)
class Step:
    """Apply *op* to the tensors *a* and *b* of the pool, counted from its end."""

    op: str
    a: int = 0
    b: int = 0


@dataclass(frozen=True)
class CastProgram:
    """What a module does, and how it is called.

    Attributes:
        steps: Its body.
        returned: Which tensors of the pool it returns.
        mode: ``"grad"``, ``"no_grad"`` or ``"inference"``.
        requires_grad: Whether its first input does.
        calls: How often it is called.
    """

    steps: tuple[Step, ...]
    returned: tuple[int, ...] = (0,)
    mode: str = "no_grad"
    requires_grad: bool = False
    calls: int = 2


class Model(nn.Module):
    """A module whose ``forward`` runs a program."""

    buffer: Tensor

    def __init__(self, program: CastProgram) -> None:
        super().__init__()
        self.program = program
        self.first = nn.Linear(_WIDTH, _WIDTH)
        self.second = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.frozen = nn.Parameter(torch.randn(_WIDTH, _WIDTH), requires_grad=False)
        self.register_buffer("buffer", torch.randn(_ROWS, _WIDTH))

    def forward(self, x: Tensor, image: Tensor, half: Tensor) -> Any:
        """Run the program on float32 *x* and *image* and bfloat16 *half*, all ``[8, 32]``."""
        pool = [self.buffer, half, image, x]
        for step in self.program.steps:
            a, b = _grid(pool[-1 - step.a % len(pool)]), _grid(pool[-1 - step.b % len(pool)])
            pool.append(OPERATORS[step.op](self, a, b))
        return [pool[-1 - position % len(pool)] for position in self.program.returned]


def _grid(x: Tensor) -> Tensor:
    if x.shape == (_ROWS, _WIDTH):
        return x
    flat = x.reshape(-1)[: _ROWS * _WIDTH]
    missing = flat.new_zeros(_ROWS * _WIDTH - flat.shape[0])
    return torch.cat([flat, missing]).view(_ROWS, _WIDTH)


def _written(x: Tensor) -> Tensor:
    """*x* itself, which a write may reach although others see it too; a copy of a leaf with gradients."""
    return x.clone() if x.requires_grad and (x.is_leaf or x._is_view()) else x


def _shared_trip(a: Tensor) -> Tensor:
    high = a.float()
    return high.to(a.dtype) * 3 + high * 0.1


def _late(a: Tensor) -> Tensor:
    high = a.float()
    _written(a).mul_(1.5)
    return F.silu(high).to(a.dtype)


def _rows_between(m: Model, a: Tensor) -> Tensor:
    first = m.second(a[0].float())
    _written(a).mul_(1.5)
    return torch.stack([first, m.second(a[1].float()), m.second(a[2].float())])


def _columns_apart(m: Model, a: Tensor, *, write: bool) -> Tensor:
    """Two of the four steps of *a* as ``[2 batches, 4 steps, 32]``, each through a layer."""
    steps = a.float().reshape(2, 4, 32)
    pieces = list(steps.unbind(1)) if write else [steps[:, index] for index in range(4)]
    first = m.second(pieces[0])
    if write and not steps.requires_grad:
        steps.mul_(1.5)
    return torch.cat([first, *(m.second(pieces[index]) for index in (1, 2, 1))])


def _whole_uses(a: Tensor) -> Tensor:
    whole = a[:]
    return whole * 1.1 + whole * 0.3 + a * 0.9


def _whole_written(a: Tensor) -> Tensor:
    if not a.requires_grad:
        a[:].mul_(1.5)
    return a.detach()[:, :].mul_(0.5)


def _whole_reshaped(a: Tensor) -> Tensor:
    whole = a[:]
    a.unsqueeze_(0)
    return whole.sum(0) + a


_DOUBLED = torch.tensor([0, 3, 3, 1, 7, 0, 2, 5])

# fmt: off
OPERATORS: Mapping[str, Callable[[Model, Tensor, Tensor], Tensor]] = MappingProxyType({
    # casts of the model's own
    "to_bf16": lambda m, a, b: a.bfloat16(),
    "to_f16": lambda m, a, b: a.half(),
    "to_f32": lambda m, a, b: a.float(),
    "to_f64": lambda m, a, b: a.double(),
    "round_trip": lambda m, a, b: a.float().to(a.dtype),
    "narrow_trip": lambda m, a, b: a.half().to(a.dtype),
    "shared_trip": lambda m, a, b: _shared_trip(a),
    "doubled_trip": lambda m, a, b: a.double().bfloat16(),
    # movement
    "transpose": lambda m, a, b: a.t(),
    "transpose_3d": lambda m, a, b: a.view(2, 4, 32).transpose(0, 1) if a.is_contiguous() else a,
    "packed": lambda m, a, b: a.t().contiguous(),
    "rows": lambda m, a, b: a[2:6],
    "columns": lambda m, a, b: a[:, ::2],
    "row": lambda m, a, b: a[3],
    "column": lambda m, a, b: a[:, 1],
    "cat": lambda m, a, b: torch.cat([a[:4], b[4:].to(a.dtype)]),
    "cat_self": lambda m, a, b: torch.cat([a[4:], a[:4]]),
    "stack": lambda m, a, b: torch.stack([a[0], a[2], a[2]]),
    "gather": lambda m, a, b: a[_DOUBLED],
    "index_select": lambda m, a, b: a.index_select(0, _DOUBLED[:4]),
    "flip": lambda m, a, b: a.flip(0),
    "roll": lambda m, a, b: a.roll(3, 1),
    "expand": lambda m, a, b: a[:1].expand(8, 32),
    "repeat": lambda m, a, b: a[:2].repeat(4, 1),
    "halves": lambda m, a, b: torch.cat(a.chunk(2, 0)[::-1]),
    "unbound": lambda m, a, b: torch.stack(list(a.unbind(0))[1:]),
    "filled": lambda m, a, b: a.masked_fill(b > 0, 0.0),
    "filled_tenth": lambda m, a, b: a.masked_fill(b > 0, 0.1),
    "filled_high": lambda m, a, b: a.float().masked_fill(b > 0, 0.1)[2:4] * 1.5,
    "padded": lambda m, a, b: F.pad(a.detach()[:, 1:], (0, 1), value=0.1),
    "lower_left": lambda m, a, b: a.tril(),
    "whole": lambda m, a, b: (a * 0.7)[:, :32],
    "whole_twice": lambda m, a, b: (a * 0.7)[:8].expand(8, -1).detach() * 3,
    "whole_uses": lambda m, a, b: _whole_uses(a * 0.7),
    "whole_written": lambda m, a, b: _whole_written(a * 0.7),
    "whole_reshaped": lambda m, a, b: _whole_reshaped(a * 0.7),
    # what casts
    "linear": lambda m, a, b: m.first(a.float()),
    "linear_twice": lambda m, a, b: m.first(a.float()) + m.second(a.float()),
    "linear_as_it_is": lambda m, a, b: m.second(a if a.dtype is not torch.float64 else a.float()),
    "frozen": lambda m, a, b: a.float() @ m.frozen,
    "frozen_transposed": lambda m, a, b: a.float() @ m.frozen.t() + a.float() @ m.frozen.t(),
    "rows_apart": lambda m, a, b: torch.cat([m.first(row.float()) for row in a.split(4)]),
    "row_by_row": lambda m, a, b: torch.stack([m.second(a[i].float()) for i in range(3)]),
    "column_by_column": lambda m, a, b: _columns_apart(m, a, write=False),
    "columns_between": lambda m, a, b: _columns_apart(m, a, write=True),
    "three_uses": lambda m, a, b: (a @ a.t()) @ b + (a.t() @ a).mean() if a.dtype is b.dtype else a,
    # arithmetic
    "add": lambda m, a, b: a + b,
    "mul": lambda m, a, b: a * b,
    "scaled": lambda m, a, b: a * 0.1,
    "softmax": lambda m, a, b: a.softmax(1),
    # sandwiches
    "silu_high": lambda m, a, b: F.silu(a.float()).to(a.dtype),
    "sqrt_high": lambda m, a, b: a.float().abs().sqrt().to(a.dtype),
    "gelu_high": lambda m, a, b: F.gelu(a.float()).to(a.dtype),
    "exp_high": lambda m, a, b: a.float().clamp(max=2).exp().to(a.dtype),
    "plus_tenth_high": lambda m, a, b: (a.float() + 0.1).to(a.dtype),
    "tanh_high_kept": lambda m, a, b: torch.cat([a.float().tanh().to(a.dtype)[:4], a[4:]]),
    # writes
    "silu_late": lambda m, a, b: _late(a),
    "rows_between": lambda m, a, b: _rows_between(m, a),
    "mul_": lambda m, a, b: _written(a).mul_(1.5),
    "row_": lambda m, a, b: (_written(a)[0].add_(1), a)[1],
    "copy_": lambda m, a, b: _written(a).copy_(b.detach()),
    "buffer_": lambda m, a, b: m.buffer.add_(b.detach().float()),
})
# fmt: on


def cast_programs(
    names: Sequence[str] = tuple(OPERATORS), modes: Sequence[str] = ("no_grad", "grad", "inference")
) -> st.SearchStrategy[CastProgram]:
    """Programs of up to ten steps out of *names*, called in *modes*."""
    near = st.sampled_from((0, 0, 0, 1, 1, 2, 3, 4))
    step = st.builds(Step, st.sampled_from(sorted(names)), near, near)
    return st.builds(
        CastProgram,
        st.lists(step, min_size=1, max_size=10).map(tuple),
        st.lists(st.integers(0, 6), min_size=1, max_size=3).map(tuple),
        st.sampled_from(tuple(modes)),
        st.booleans(),
    )


def differ(program: CastProgram, choose: Callable[[CleanUp], Pass | None]) -> list[str]:
    """What eager autocast and fxamp give differently.

    Args:
        program: What is run.
        choose: For each clean-up pass of the pipeline, what runs in its place; ``None`` for nothing.
    """
    torch.manual_seed(0)
    eager = Model(program)
    source = copy.deepcopy(eager)
    amp = fxamp.convert(source, dtype=torch.bfloat16)

    def pipeline(captured: Captured, policy: Policy) -> tuple[Pass, ...]:
        chosen = [
            choose(step) if isinstance(step, CleanUp) else step for step in build_pipeline(captured, policy)
        ]
        return tuple(step for step in chosen if step is not None)

    with patch("fxamp.runtime.build_program.build_pipeline", pipeline):
        for call in range(program.calls):
            autocast = torch.autocast("cpu", torch.bfloat16)
            expected = _outcome(eager, autocast(eager.__call__), program, call)
            found = _outcome(source, amp, program, call)
            different = differences(expected, found)
            if different or expected.error is not None:
                return different
            if amp.eager_modules:
                return [f"left eager: {piece}" for piece in amp.report().eager]
    return []


def _outcome(model: nn.Module, call: Callable[..., Any], program: CastProgram, seed: int) -> Outcome:
    random = torch.Generator().manual_seed(seed)
    x, image, half = (torch.randn(_ROWS, _WIDTH, generator=random) for _ in range(3))
    inputs = (x.requires_grad_(program.requires_grad), image, half.bfloat16())
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with _MODES[program.mode]():
                results = call(*inputs)
        except Exception as error:  # noqa: BLE001  the error is what came of it
            return Outcome(error=error)
        outputs = [result for result in dict.fromkeys(results) if result.requires_grad]
        cotangents = [torch.randn(out.shape, generator=random).to(out.dtype) for out in outputs]
        try:
            if outputs:
                torch.autograd.backward(outputs, cotangents)
        except Exception as error:  # noqa: BLE001
            return Outcome(None, tuple(results), inputs, error, random=torch.get_rng_state())
    leaves = [tensor for tensor in (*inputs, *model.parameters()) if tensor.is_leaf]
    gradients = tuple(leaf.grad for leaf in leaves)
    everything = (*results, *_identities(results, inputs), *model.buffers())
    return Outcome(None, everything, inputs, None, gradients, torch.get_rng_state())


def _identities(results: list[Tensor], inputs: tuple[Tensor, ...]) -> list[int]:
    """Which results are the same tensor, or share memory with another one."""
    tensors = [*inputs, *results]
    memories = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    same = [next(i for i, other in enumerate(tensors) if other is tensor) for tensor in results]
    return [*same, *map(memories.index, memories)]
