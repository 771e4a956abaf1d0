"""What a clean-up pass is, and how exact one may be in a given program.

A graph with every cast in eager's place is right already.  A clean-up pass drops, shares or moves casts, and
says what that keeps:

``training-exact``    outputs, gradients and buffers have the same bits
``inference-exact``   outputs and buffers have the same bits; gradients would be added up in another order
``relaxed``           other bits, within a stated error; never chosen for anybody

Where no gradients are recorded nothing is added up, so each pass may do there whatever is inference-exact.
A program that records some gets the same passes at ``training-exact``: they leave alone every value that a
gradient flows through, and work on the rest (images, masks, tables of positions).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from torch.fx import Graph, Node

from fxamp.ir.edits import note_edit
from fxamp.ir.facts import Fact, Facts
from fxamp.passes.base import Pass

__all__ = ["CleanUp", "Level", "level_for", "takes_part_in_gradient"]


class Level(Enum):
    """What a rewrite keeps."""

    TRAINING_EXACT = "training-exact"
    INFERENCE_EXACT = "inference-exact"
    RELAXED = "relaxed"


@dataclass(frozen=True)
class CleanUp(Pass):
    """A pass that drops, shares or moves casts.

    Attributes:
        level: How exact it has to be in the program at hand.
        condition: What makes its edits exact, in a few words, for the report.
    """

    level: Level
    condition: ClassVar[str]

    def may_touch(self, *nodes: Node) -> bool:
        """Whether the level lets casts of these values be changed: in training, if no gradient meets them."""
        return self.level is not Level.TRAINING_EXACT or not any(
            takes_part_in_gradient(node.meta.get("fact")) for node in nodes
        )

    def note(self, graph: Graph, node: Node, what: str) -> None:
        """Leave a trace of what was done to the cast *node*."""
        note_edit(graph, node, self.name, self.level.value, what, self.condition)


def level_for(graphs: Iterable[Graph]) -> Level:
    """How exact a clean-up must be in a program of these *graphs*: do its operators record gradients?"""
    results = (
        node.meta.get("fact") for graph in graphs for node in graph.nodes if node.op == "call_function"
    )
    return Level.TRAINING_EXACT if any(map(takes_part_in_gradient, results)) else Level.INFERENCE_EXACT


def takes_part_in_gradient(facts: Facts) -> bool:
    """Whether a gradient flows into any tensor of *facts*."""
    if isinstance(facts, Fact):
        return facts.requires_grad
    return isinstance(facts, tuple) and any(map(takes_part_in_gradient, facts))
