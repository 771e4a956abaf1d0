"""Each clean-up pass keeps the bits of random programs; without its condition it does not.

For every pass there is a broken one, whose condition is gone; that a counterexample is found for it shows
that the test of the real pass would turn red.  ``-m slow`` draws many more programs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis.errors import NoSuchExample
from torch.fx import Graph, Node

from fxamp.ir.memory import Memory
from fxamp.passes.base import Pass
from fxamp.passes.clean_up import CleanUp, Level
from fxamp.passes.fold_cast_chains import FoldCastChains
from fxamp.passes.place_casts import PlaceCasts
from fxamp.passes.share_casts import ShareCasts
from tests.passes.cast_programs import CastProgram, cast_programs, differ

_CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large]
_EXAMPLES = int(os.environ.get("FXAMP_EXAMPLES", "1000"))
PASSES = (ShareCasts, FoldCastChains, PlaceCasts)


def only(kind: type[CleanUp]) -> Callable[[CleanUp], Pass | None]:
    """Leave the pass of class *kind* in the pipeline, and no other clean-up."""
    return lambda step: step if isinstance(step, kind) else None


@pytest.mark.parametrize("kind", PASSES, ids=lambda kind: kind.name)
@settings(max_examples=40, derandomize=True, deadline=None, suppress_health_check=_CHECKS, database=None)
@given(program=cast_programs())
def test_a_pass_keeps_the_bits(kind: type[CleanUp], program: CastProgram) -> None:
    assert differ(program, only(kind)) == []


@settings(max_examples=40, derandomize=True, deadline=None, suppress_health_check=_CHECKS, database=None)
@given(program=cast_programs())
def test_all_passes_together_keep_the_bits(program: CastProgram) -> None:
    assert differ(program, lambda step: step) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", (*PASSES, CleanUp), ids=lambda kind: getattr(kind, "name", "all"))
@settings(max_examples=_EXAMPLES, deadline=None, suppress_health_check=_CHECKS, print_blob=True)
@given(program=cast_programs())
def test_a_pass_keeps_the_bits_of_many_programs(kind: type[CleanUp], program: CastProgram) -> None:
    assert differ(program, only(kind)) == []
