"""What a pass is.

A pass rewrites graphs in place and does one thing.  It is a frozen dataclass whose fields are its
options; its docstring says what holds afterwards; running it twice is running it once; and it leaves a
graph that ``graph.lint()`` accepts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Graph, GraphModule

__all__ = ["Pass", "graphs_of"]


@dataclass(frozen=True)
class Pass(ABC):
    """A rewrite or an analysis of one graph at a time."""

    name: ClassVar[str]

    @abstractmethod
    def run(self, graph: Graph) -> bool:
        """Rewrite *graph* in place; say whether anything changed."""

    def __call__(self, module: GraphModule) -> bool:
        """Run on *module*'s graph and on every sub-graph (a branch of ``torch.cond``, say)."""
        changed = [self.run(graph) for graph in graphs_of(module)]
        return any(changed)


def graphs_of(module: GraphModule) -> Iterator[Graph]:
    """The graph of *module* and those of the GraphModules inside it."""
    for child in module.modules():
        if isinstance(child, GraphModule):
            yield child.graph
