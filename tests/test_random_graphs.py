"""Random programs run as under eager autocast, to the bit: results, gradients, buffers, random state.

The default run draws a few dozen programs and always the same ones.  ``-m slow`` draws 2,000 new ones, or
as many as ``FXAMP_EXAMPLES`` says; ``--hypothesis-show-statistics`` counts what came of them.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

import fxamp
from tests.conformance.comparison import Outcome, differences
from tests.random_program import LEFT_EAGER, Model, Program, programs

_MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}
_EXAMPLES = int(os.environ.get("FXAMP_EXAMPLES", "2000"))
_CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large]


@dataclass(frozen=True)
class Setting:
    """How a program is called.

    Attributes:
        low: The dtype of the region.
        training: Whether the module is in training mode.
        mode: ``"grad"``, ``"no_grad"`` or ``"inference"``.
        requires_grad: Whether the inputs do.
        rows: The batch sizes of the calls, one after the other.
        seed: Of weights and inputs.
    """

    low: torch.dtype = torch.bfloat16
    training: bool = True
    mode: str = "grad"
    requires_grad: bool = False
    rows: tuple[int, ...] = (3, 5)
    seed: int = 0


def settings_of_a_call() -> st.SearchStrategy[Setting]:
    rows = st.sampled_from(((3, 5, 5), (4, 2, 4), (2, 6), (3, 1), (1, 3), (5, 0), (8, 3)))
    return st.builds(
        Setting,
        low=st.sampled_from((torch.bfloat16, torch.float16)),
        training=st.booleans(),
        mode=st.sampled_from(("grad", "grad", "grad", "no_grad", "inference")),
        requires_grad=st.booleans(),
        rows=rows,
        seed=st.integers(0, 2**16),
    )


def inputs_of(program: Program, setting: Setting, rows: int) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(setting.seed + rows)
    x, other = (torch.randn(rows, 8, generator=random) for _ in range(2))
    other = (other * 3).to(program.input_dtype)
    mask = torch.rand(rows, 8, generator=random) > 0.5
    index = torch.randint(0, 8, (rows,), generator=random)
    x.requires_grad_(setting.requires_grad)
    other.requires_grad_(setting.requires_grad and other.is_floating_point())
    return x, other, mask, index


def outcome(model: nn.Module, call: Callable[..., Any], inputs: tuple[Tensor, ...], mode: str) -> Outcome:
    """Call, take the gradients, and note everything that can be told from outside."""
    model.zero_grad()
    torch.manual_seed(7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with _MODES[mode]():
                tensors = [tensor for tensor in tree_flatten(call(*inputs))[0] if isinstance(tensor, Tensor)]
        except Exception as error:  # noqa: BLE001  the error is what came of it
            return Outcome(error=error)
        try:
            _backward(tensors)
        except Exception as error:  # noqa: BLE001
            return Outcome(None, tuple(tensors), inputs, backward_error=error, random=torch.get_rng_state())
    gradients = tuple(tensor.grad for tensor in (*inputs, *model.parameters()))
    same = tuple(next((i for i, one in enumerate(inputs) if one is tensor), -1) for tensor in tensors)
    results = (*tensors, same, *model.buffers(), *model.parameters())
    return Outcome(None, results, inputs, None, gradients, torch.get_rng_state())


def _backward(results: list[Tensor]) -> None:
    outputs = [tensor for tensor in dict.fromkeys(results) if tensor.requires_grad]
    random = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(output.shape, generator=random).to(output.dtype) for output in outputs]
    if outputs:
        torch.autograd.backward(outputs, cotangents)


def check(program: Program, setting: Setting) -> str:
    """Compare eager autocast and fxamp on the calls of *setting*; say what came of them."""
    torch.manual_seed(setting.seed)
    eager = Model(program).train(setting.training)
    source = copy.deepcopy(eager)
    amp = fxamp.convert(source, dtype=setting.low)
    told = ""
    for rows in setting.rows:
        expected = outcome(
            eager,
            torch.autocast("cpu", setting.low)(eager.__call__),
            inputs_of(program, setting, rows),
            setting.mode,
        )
        found = outcome(source, amp, inputs_of(program, setting, rows), setting.mode)
        note(f"{rows} rows: eager error: {expected.error}; {amp.report().eager}")
        different = differences(expected, found)
        assert not different, different
        if expected.error is not None:
            return told or "raised"
        left_eager = not program.ops().isdisjoint(LEFT_EAGER)
        assert left_eager or amp.eager_modules == (), amp.report().eager
        told = "left eager" if amp.eager_modules else "in a graph"
    return told


@settings(max_examples=50, derandomize=True, deadline=None, suppress_health_check=_CHECKS, database=None)
@given(programs(), settings_of_a_call())
def test_random_programs_run_as_under_eager_autocast(program: Program, setting: Setting) -> None:
    event(check(program, setting))


@pytest.mark.slow
@settings(max_examples=_EXAMPLES, deadline=None, suppress_health_check=_CHECKS, print_blob=True)
@given(programs(), settings_of_a_call())
def test_many_random_programs_run_as_under_eager_autocast(program: Program, setting: Setting) -> None:
    event(check(program, setting))
