"""The pipeline, as a list."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.fx import GraphModule

from fxamp.capture.segments import Captured
from fxamp.passes.base import Pass, graphs_of
from fxamp.passes.classify import Classify
from fxamp.passes.clean_up import level_for
from fxamp.passes.expand_composites import ExpandComposites
from fxamp.passes.flatten_regions import FlattenRegions
from fxamp.passes.fold_cast_chains import FoldCastChains
from fxamp.passes.fold_noop_casts import FoldNoopCasts
from fxamp.passes.fold_noop_movement import FoldNoopMovement
from fxamp.passes.insert_casts import InsertCasts
from fxamp.passes.join_slice_casts import JoinSliceCasts
from fxamp.passes.keep_reentrant import KeepReentrant
from fxamp.passes.place_casts import PlaceCasts
from fxamp.passes.propagate_dtypes import PropagateDtypes
from fxamp.passes.remove_dead_code import RemoveDeadCode
from fxamp.passes.remove_sandwiches import RemoveSandwiches
from fxamp.passes.resolve_promotes import ResolvePromotes
from fxamp.passes.share_casts import ShareCasts
from fxamp.passes.verify import Verify
from fxamp.policy import Policy

__all__ = ["build_pipeline", "run_passes"]


def build_pipeline(captured: Captured, policy: Policy) -> tuple[Pass, ...]:
    """The passes that turn *captured* into the program that eager autocast would run under *policy*."""
    fakes = captured.fakes
    blocks = [graph for block in captured.blocks.values() for graph in graphs_of(block)]
    level = level_for((captured.graph, *blocks))
    return (
        FlattenRegions(captured.region, captured.grad),
        ExpandComposites(policy, fakes, captured.placed),
        PropagateDtypes(fakes),
        Classify(policy),
        ResolvePromotes(policy),
        InsertCasts(policy),
        KeepReentrant(captured.placed),
        FoldNoopCasts(),
        FoldNoopMovement(level),
        FoldCastChains(level),  # a pair that the next pass would part
        PlaceCasts(level),
        JoinSliceCasts(level),
        FoldCastChains(level),
        RemoveSandwiches(level),
        ShareCasts(level),
        RemoveDeadCode(),
        Verify(policy, fakes),
    )


def run_passes(
    module: GraphModule, passes: Sequence[Pass], watch: Callable[[Pass, GraphModule], None] | None = None
) -> None:
    """Run *passes* in order; ``watch(pass, module)`` is called after each, to show the graph, say."""
    for step in passes:
        step(module)
        if watch is not None:
            watch(step, module)
