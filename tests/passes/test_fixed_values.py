"""Random programs over weights have the bits of eager autocast frozen; without a condition they have not.

For each condition there is a program that has other bits where the condition is gone.  ``-m slow`` draws many
more random ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings

from fxamp.ir.memory import Memory
from fxamp.passes.fixed_values import FixedValues
from fxamp.passes.fold_weight_arithmetic import FoldWeightArithmetic
from tests.passes.weight_programs import WeightProgram, differ, weight_programs

_CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large]
_EXAMPLES = int(os.environ.get("FXAMP_EXAMPLES", "1000"))


@settings(max_examples=30, derandomize=True, deadline=None, suppress_health_check=_CHECKS, database=None)
@given(program=weight_programs())
def test_what_is_computed_once_keeps_the_bits(program: WeightProgram) -> None:
    assert differ(program) == []


@settings(max_examples=30, derandomize=True, deadline=None, suppress_health_check=_CHECKS, database=None)
@given(program=weight_programs())
def test_running_the_pass_twice_is_running_it_once(program: WeightProgram) -> None:
    again: list[bool] = []
    run = FoldWeightArithmetic.run

    def twice(step: FoldWeightArithmetic, graph: Any) -> bool:
        changed = run(step, graph)
        again.append(run(step, graph))
        return changed

    with patch.object(FoldWeightArithmetic, "run", twice):
        assert differ(program) == []
    assert not any(again)


@pytest.mark.slow
@settings(max_examples=_EXAMPLES, deadline=None, suppress_health_check=_CHECKS, print_blob=True)
@given(program=weight_programs())
def test_what_is_computed_once_keeps_the_bits_of_many_programs(program: WeightProgram) -> None:
    assert differ(program) == []


# --- without its conditions ---------------------------------------------------------------------------

_FIXED, _FOLD = "fxamp.passes.fixed_values", "fxamp.passes.fold_weight_arithmetic"
_DERIVED = "fxamp.runtime.derived_weights.Derived"


@dataclass(frozen=True)
class Broken:
    """A condition that is gone, and a program that sees it.

    Attributes:
        patched: What is put in the place of what.
        steps: The program's.
        returned: What it returns besides.
    """

    patched: Callable[[], Any]
    steps: tuple[tuple[str, int, int], ...]
    returned: tuple[int, ...] = ()


# The pool is at first: the buffer, the input, a turned weight and, last, a weight.
BROKEN = {
    "what is given away is kept": Broken(
        lambda: patch.object(Memory, "escapes", lambda memory, node: False), (("mul", 0, 0),), (0,)
    ),
    "writes of what varies are not seen": Broken(
        lambda: patch.object(FixedValues, "_spoils", lambda values, node: False),
        (("mul", 0, 0), ("add_", 0, 3)),
    ),
    "writes are left out": Broken(
        lambda: patch.object(FixedValues, "writes_to", lambda values, node: []),
        (("mul", 0, 0), ("mul_", 0, 0), ("exp", 0, 0)),
    ),
    "reads may come too early": Broken(
        lambda: patch(f"{_FOLD}._needed", lambda node, memory, fixed: ()),
        (("mul", 0, 0), ("add", 0, 3), ("mul_", 1, 0), ("add", 0, 1)),
    ),
    "random operators repeat": Broken(
        lambda: patch(f"{_FIXED}.is_repeatable", lambda target: "rand" in str(target)), (("noise", 0, 0),)
    ),
    "weights are read once": Broken(
        lambda: patch(f"{_DERIVED}.refresh", lambda derived: True), (("exp", 0, 0),)
    ),
    "buffers are read once": Broken(
        lambda: patch(f"{_DERIVED}.refresh", lambda derived: True), (("exp", 3, 0),)
    ),
    "keys leave arguments out": Broken(
        lambda: patch("fxamp.ir.derivation._frozen", lambda value, numbers: None),
        (("double", 0, 0), ("add", 0, 3), ("triple", 2, 0), ("add", 0, 1)),
    ),
}


@pytest.mark.parametrize("condition", BROKEN)
def test_each_condition_is_needed(condition: str) -> None:
    broken = BROKEN[condition]
    program = WeightProgram(broken.steps, broken.returned)
    assert differ(program) == []
    with broken.patched():
        assert differ(program) != []
