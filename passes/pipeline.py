"""The pipeline, as a list."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.fx import GraphModule

from fxamp.capture.segments import Captured
from fxamp.passes.base import Pass
from fxamp.passes.classify import Classify
from fxamp.passes.expand_composites import ExpandComposites
from fxamp.passes.flatten_regions import FlattenRegions
from fxamp.passes.fold_noop_casts import FoldNoopCasts
from fxamp.passes.insert_casts import InsertCasts
from fxamp.passes.keep_reentrant import KeepReentrant
from fxamp.passes.propagate_dtypes import PropagateDtypes
from fxamp.passes.remove_dead_code import RemoveDeadCode
from fxamp.passes.resolve_promotes import ResolvePromotes
from fxamp.passes.verify import Verify
from fxamp.policy import Policy

__all__ = ["build_pipeline", "run_passes"]


def build_pipeline(captured: Captured, policy: Policy) -> tuple[Pass, ...]:
    """The passes that turn *captured* into the program that eager autocast would run under *policy*."""
    fakes = captured.fakes
    return (
        FlattenRegions(captured.region, captured.grad),
        ExpandComposites(policy, fakes, captured.placed),
        PropagateDtypes(fakes),
        Classify(policy),
        ResolvePromotes(policy),
        InsertCasts(policy),
        KeepReentrant(captured.placed),
        FoldNoopCasts(),
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
