"""Random programs, frozen, run as under eager autocast without gradients, to the bit.

Compared are results, buffers and the random state.

The default run draws a few dozen programs and always the same ones; ``-m slow`` draws as many new ones as
``FXAMP_EXAMPLES`` says.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, event, given, note, settings
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

import fxamp
from tests.conformance.comparison import Outcome, differences
from tests.random_program import Model, Program, programs
from tests.test_random_graphs import Setting, inputs_of, settings_of_a_call

_EXAMPLES = int(os.environ.get("FXAMP_EXAMPLES", "500"))
_CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large]
_MODES = {"inference": torch.inference_mode}


def _outcome(model: nn.Module, call: Callable[..., Any], inputs: tuple[Tensor, ...], mode: str) -> Outcome:
    torch.manual_seed(7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with _MODES.get(mode, torch.no_grad)():
                tensors = [tensor for tensor in tree_flatten(call(*inputs))[0] if isinstance(tensor, Tensor)]
        except Exception as error:  # noqa: BLE001  the error is what came of it
            return Outcome(error=error)
    buffers = dict(model.named_buffers()).values()
    return Outcome(None, (*tensors, *buffers), inputs, random=torch.get_rng_state())


def _check(program: Program, setting: Setting, *, consume: bool) -> str:
    torch.manual_seed(setting.seed)
    eager = Model(program).eval()
    source = copy.deepcopy(eager)
    amp = fxamp.convert(source, dtype=setting.low)
    example = tuple(each.detach() for each in inputs_of(program, setting, setting.rows[0]))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            frozen = fxamp.freeze(amp, example, consume=consume)
    except Exception:
        under_eager = torch.autocast("cpu", setting.low)(copy.deepcopy(eager).__call__)
        if _outcome(eager, under_eager, example, "no_grad").error is None:
            raise
        return "the example raises"
    for rows in setting.rows:
        inputs = inputs_of(program, setting, rows)
        expected = _outcome(eager, torch.autocast("cpu", setting.low)(eager.__call__), inputs, setting.mode)
        found = _outcome(frozen, frozen, inputs_of(program, setting, rows), setting.mode)
        note(f"{rows} rows: {expected.error}, {found.error}; {frozen.report().eager}")
        different = differences(expected, found)
        assert not different, different
        if expected.error is not None:
            return "raises"
    return "left eager" if frozen.eager_modules else "in a graph"


@settings(max_examples=20, derandomize=True, deadline=None, suppress_health_check=_CHECKS, database=None)
@given(programs(), settings_of_a_call())
def test_random_programs_run_frozen_as_under_eager_autocast(program: Program, setting: Setting) -> None:
    event(_check(program, setting, consume=setting.seed % 2 == 0))


@pytest.mark.slow
@settings(max_examples=_EXAMPLES, deadline=None, suppress_health_check=_CHECKS, print_blob=True)
@given(programs(), settings_of_a_call())
def test_many_random_programs_run_frozen_as_under_eager_autocast(program: Program, setting: Setting) -> None:
    event(_check(program, setting, consume=setting.seed % 2 == 0))
