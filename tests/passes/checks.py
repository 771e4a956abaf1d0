"""One pass on one small function: the graph as text, before and after.

``check`` captures a function in a region, runs the pipeline up to the pass, and compares what
``fxamp.ir.text.show`` prints before and after it; and that running the pass again changes nothing.
``prepared`` stops before the pass, for tests that look at facts which are not in the text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from textwrap import dedent
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from fxamp.capture.capture import capture
from fxamp.capture.segments import Captured
from fxamp.capture.structure import flatten
from fxamp.capture.symbols import Sizes
from fxamp.ir.regions import Region
from fxamp.ir.text import show
from fxamp.passes import build_pipeline
from fxamp.passes.base import Pass
from fxamp.policy import Policy
from fxamp.runtime.build_program import graph_module

__all__ = ["BF16", "CPU", "Prepared", "captured", "check", "prepared"]

CPU = Policy.native("cpu", torch.bfloat16)
BF16 = Region("cpu", enabled=True, dtype=torch.bfloat16)


@dataclass(frozen=True)
class Prepared:
    """A graph on which all passes before *step* have run.

    Attributes:
        module: The graph.
        step: The pass that is next.
        captured: What was recorded.
    """

    module: GraphModule
    step: Pass
    captured: Captured

    def node(self, name: str) -> Node:
        """The node of that name."""
        found: Node = next(node for node in self.module.graph.nodes if node.name == name)
        return found


def captured(
    function: Callable[..., object], *args: Any, region: Region = BF16, sizes: Sizes = Sizes.FIXED
) -> Captured:
    """The call ``function(*args)`` as recorded in *region*, by default with the sizes of *args*."""
    spec, leaves = flatten((args, {}))
    return capture(function, spec, leaves, region, sizes)


def prepared(
    kind: type[Pass],
    function: Callable[..., object] | nn.Module,
    *args: Any,
    policy: Policy = CPU,
    region: Region = BF16,
) -> Prepared:
    """Capture ``function(*args)`` and run the pipeline up to the pass of class *kind*."""
    recorded = captured(function, *args, region=region)
    root = function if isinstance(function, nn.Module) else nn.Module()
    module = graph_module(recorded.graph, recorded.sources, root)
    for step in build_pipeline(recorded, policy):
        if isinstance(step, kind):
            return Prepared(module, step, recorded)
        step(module)
    raise LookupError(f"{kind.__name__} is not in the pipeline")


def check(
    kind: type[Pass],
    function: Callable[..., object] | nn.Module,
    *args: Any,
    before: str,
    after: str,
    policy: Policy = CPU,
    region: Region = BF16,
) -> Prepared:
    """Compare the graph of ``function(*args)`` before and after the pass of class *kind*."""
    ready = prepared(kind, function, *args, policy=policy, region=region)
    _compare(ready, "before", before)
    changed = ready.step(ready.module)
    _compare(ready, "after", after)
    assert changed or dedent(before) == dedent(after), "it changed the graph and said that it did not"
    ready.module.graph.lint()
    assert not ready.step(ready.module), "a second run changed something"
    _compare(ready, "after a second run", after)
    return ready


def _compare(ready: Prepared, when: str, expected: str) -> None:
    text = show(ready.module)
    assert text == dedent(expected).strip(), f"{when}:\n{text}"
