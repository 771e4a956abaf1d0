"""Which casts the clean-up passes take out of a graph, and by which condition."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from fxamp.ir.facts import Size, fact_of_node
from fxamp.ir.operators import is_to_dtype
from fxamp.ir.where import Where
from fxamp.passes.base import Pass, graphs_of

__all__ = ["CastLog", "RemovedCast"]


@dataclass(frozen=True)
class RemovedCast:
    """A cast that was in a graph and is there no more.

    Attributes:
        node: Its name.
        dtype: What it cast to.
        where: The operator that it was made for, or the line that wrote it.
        by: The pass that removed it.
        condition: What holds after that pass.
        bytes: What it would have written.
        of_autocast: Whether it was one that eager autocast makes; else the model wrote it.
    """

    node: str
    dtype: str
    where: Where
    by: str
    condition: str
    bytes: Size
    of_autocast: bool

    def __str__(self) -> str:
        whose = "" if self.of_autocast else ", written by the model"
        return f"%{self.node} to {self.dtype}{whose}, by {self.by}: {self.condition} ({self.where})"


class CastLog:
    """Looks at a graph after each pass; made to be given to ``run_passes``.

    Attributes:
        removed: The casts that have gone.
    """

    def __init__(self) -> None:
        self.removed: tuple[RemovedCast, ...] = ()
        self._there: dict[Node, tuple[str, str, Where, Size, bool]] = {}

    def __call__(self, step: Pass, module: GraphModule) -> None:
        """Note what *step* has removed from *module*."""
        now = {
            node: (node.name, *_told(node))
            for graph in graphs_of(module)
            for node in graph.nodes
            if is_to_dtype(node)
        }
        condition = (inspect.getdoc(type(step)) or "").splitlines()[0].rstrip(".")
        for node, (name, dtype, where, size, of_autocast) in self._there.items():
            if node not in now:
                self.removed += (RemovedCast(name, dtype, where, step.name, condition, size, of_autocast),)
        self._there = now


def _told(node: Node) -> tuple[str, Where, Size, bool]:
    fact = fact_of_node(node)
    dtype = fact.dtype.abbr if fact is not None else "?"
    size = fact.bytes if fact is not None and "inserted" in node.meta else 0
    return dtype, node.meta.get("where") or Where(), size, "inserted" in node.meta
