"""Each clean-up pass keeps the bits of random programs; without its condition it does not.

For every pass there is a broken one, whose condition is gone; that a counterexample is found for it shows
that the test of the real pass would turn red.  ``-m slow`` draws many more programs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from torch import nn
from torch.fx import Graph, Node

from fxamp.ir.memory import Memory
from fxamp.passes.base import Pass
from fxamp.passes.clean_up import CleanUp, Level, level_for
from fxamp.passes.fold_cast_chains import FoldCastChains
from fxamp.passes.fold_noop_movement import FoldNoopMovement
from fxamp.passes.join_slice_casts import JoinSliceCasts
from fxamp.passes.place_casts import PlaceCasts
from fxamp.passes.remove_sandwiches import RemoveSandwiches
from fxamp.passes.share_casts import ShareCasts
from tests.passes.cast_programs import CastProgram, Model, cast_programs, differ
from tests.passes.checks import captured, prepared

_CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large]
_EXAMPLES = int(os.environ.get("FXAMP_EXAMPLES", "1000"))
PASSES = (FoldNoopMovement, ShareCasts, FoldCastChains, PlaceCasts, JoinSliceCasts, RemoveSandwiches)


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


@pytest.mark.parametrize("kind", PASSES, ids=lambda kind: kind.name)
@settings(max_examples=25, derandomize=True, deadline=None, suppress_health_check=_CHECKS, database=None)
@given(program=cast_programs(modes=("no_grad",)))
def test_running_a_pass_twice_is_running_it_once(kind: type[CleanUp], program: CastProgram) -> None:
    x = torch.randn(8, 32)
    try:
        with torch.no_grad():
            ready = prepared(kind, Model(program), x, x.clone(), x.bfloat16())
    except Exception:  # noqa: BLE001  eager raises as well
        return
    ready.step(ready.module)
    ready.module.graph.lint()
    assert not ready.step(ready.module)


def test_a_program_that_records_gradients_gets_passes_that_are_exact_for_training() -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)

    def level() -> Level:
        return level_for([captured(model, x).graph])

    assert level() is Level.TRAINING_EXACT
    with torch.no_grad():
        assert level() is Level.INFERENCE_EXACT
    with torch.inference_mode():
        assert level() is Level.INFERENCE_EXACT
    model.requires_grad_(requires_grad=False)
    assert level() is Level.INFERENCE_EXACT


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*PASSES, CleanUp], ids=lambda kind: getattr(kind, "name", "all"))
@settings(max_examples=_EXAMPLES, deadline=None, suppress_health_check=_CHECKS, print_blob=True)
@given(program=cast_programs())
def test_a_pass_keeps_the_bits_of_many_programs(kind: type[CleanUp], program: CastProgram) -> None:
    assert differ(program, only(kind)) == []


# --- without their conditions -------------------------------------------------------------------------


class _NoWrites(Memory):
    """As if nobody wrote to anything, and no output had anything."""

    def is_written(self, node: Node) -> bool:
        return False

    def is_written_between(self, node: Node, first: Node, last: Node) -> bool:
        return False

    def is_private(self, node: Node) -> bool:
        return True


class _ShareThoughWritten(ShareCasts):
    def may_share(self, first: Node, cast: Node, memory: Memory) -> bool:
        return super().may_share(first, cast, _NoWrites(Graph()))


class _ShareThoughGradients(ShareCasts):
    def may_touch(self, *nodes: Node) -> bool:
        return True


class _FoldThoughLossy(FoldCastChains):
    def holds(self, middle: torch.dtype, first: torch.dtype) -> bool:
        return True


class _FoldThoughWritten(FoldCastChains):
    def may_fold(self, middle: Node, second: Node, memory: Memory) -> bool:
        return super().may_fold(middle, second, _NoWrites(Graph()))


class _FoldThoughGradients(FoldCastChains):
    def keeps_gradients(self, source: Node, middle: Node, second: Node) -> bool:
        return True


class _PlaceThoughWritten(PlaceCasts):
    def memory(self, graph: Graph) -> Memory:
        return _NoWrites(graph)


class _PlaceThoughGradients(PlaceCasts):
    def may_move(self, node: Node) -> bool:
        return True


class _JoinThoughWritten(JoinSliceCasts):
    def may_join(self, slices: Any, memory: Memory) -> bool:
        return super().may_join(slices, _NoWrites(Graph()))


class _PlaceThoughFilled(PlaceCasts):
    def may_fill(self, number: float, high: torch.dtype, low: torch.dtype) -> bool:
        return True


class _MovementThoughGradients(FoldNoopMovement):
    def may_touch(self, *nodes: Node) -> bool:
        return True


class _MovementThoughReshaped(FoldNoopMovement):
    def keeps_shapes(self, graph: Graph) -> bool:
        return True


class _RemoveThoughDifferent(RemoveSandwiches):
    def rounds_alike(self, middle: Node, last: Node) -> bool:
        return True


class _RemoveThoughWritten(RemoveSandwiches):
    def may_remove(self, middle: Node, last: Node, memory: Memory) -> bool:
        return super().may_remove(middle, last, _NoWrites(Graph()))


@dataclass(frozen=True)
class Mutant:
    """A pass without one of its conditions, and operators among which a counterexample is soon found."""

    step: type[CleanUp]
    names: str
    modes: tuple[str, ...] = ("no_grad",)


_MUTANTS = (
    Mutant(_ShareThoughWritten, "frozen linear_twice mul_ row_"),
    Mutant(_ShareThoughGradients, "linear_twice frozen frozen_transposed three_uses softmax", ("grad",)),
    Mutant(_FoldThoughLossy, "narrow_trip doubled_trip to_f16 to_bf16 to_f32 add"),
    Mutant(_FoldThoughWritten, "round_trip to_bf16 mul_ row_ copy_ add"),
    Mutant(_FoldThoughGradients, "shared_trip to_bf16 linear_twice", ("grad",)),
    Mutant(_PlaceThoughWritten, "rows_between row_by_row mul_"),
    Mutant(_PlaceThoughGradients, "gather row_by_row index_select to_bf16 to_f32 linear add", ("grad",)),
    Mutant(_PlaceThoughFilled, "filled_high to_bf16 scaled"),
    Mutant(_JoinThoughWritten, "columns_between column_by_column"),
    Mutant(_MovementThoughGradients, "whole_uses linear", ("grad",)),
    Mutant(_MovementThoughReshaped, "whole_reshaped add"),
    Mutant(_RemoveThoughDifferent, "to_bf16 gelu_high plus_tenth_high"),
    Mutant(_RemoveThoughWritten, "to_bf16 silu_late"),
)


@pytest.mark.parametrize("mutant", _MUTANTS, ids=lambda mutant: mutant.step.__name__.strip("_"))
def test_a_pass_without_one_of_its_conditions_would_be_found_out(mutant: Mutant) -> None:
    kind = mutant.step.__mro__[1]

    def replace(step: CleanUp) -> Pass | None:
        return mutant.step(Level.INFERENCE_EXACT) if type(step) is kind else None

    def is_wrong(program: CastProgram) -> bool:
        return bool(differ(program, replace))

    search = settings(
        max_examples=400,
        derandomize=True,
        deadline=None,
        suppress_health_check=_CHECKS,
        phases=[Phase.generate],
        database=None,
    )
    programs = cast_programs(mutant.names.split(), mutant.modes)
    found = find(programs, is_wrong, settings=search)
    assert not differ(found, only(kind))
