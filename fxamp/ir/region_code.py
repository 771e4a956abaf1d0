"""Python code of graphs that have regions among their arguments: each is a global name of the code."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph
from torch.fx.graph import CodeGen

__all__ = ["RegionCode", "is_named"]


def is_named(value: object) -> bool:
    """Whether *value* is a region, whose ``repr`` is a name."""
    return getattr(value, "is_region", False) is True


class RegionCode(CodeGen):
    """Code in which the regions of *graph* are known by their names."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        values = [value for node in graph.nodes for value in node.args if is_named(value)]
        self._globals = list({repr(value): value for value in values}.items())

    def additional_globals(self) -> list[tuple[str, Any]]:
        """Names and values that the code needs."""
        return self._globals
