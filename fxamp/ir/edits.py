"""What the clean-up passes did to a graph: a trace that is left in the graph for reports.

A cast that is gone leaves no node behind that could tell why.  So each pass that drops, shares or moves one
notes an :class:`Edit`; ``edits_of`` gives them all, in order.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph, GraphModule, Node

from fxamp.ir.where import Where

__all__ = ["Edit", "edits_of", "note_edit"]

_KEY = "edits"


@dataclass(frozen=True)
class Edit:
    """One cast, or operator on weights, that is not where eager autocast, or the model, has it.

    Attributes:
        by: The name of the pass.
        level: What the pass keeps: ``"training-exact"``, ``"inference-exact"`` or ``"relaxed"``.
        what: What was done: ``"shared with %x_bf16"``, say.
        condition: Why that was allowed.
        node: The name that it had.
        where: Module path and source line of its consumer.
    """

    by: str
    level: str
    what: str
    condition: str
    node: str
    where: Where

    def __str__(self) -> str:
        return f"%{self.node}: {self.what} by {self.by} ({self.level}: {self.condition}), {self.where}"


def note_edit(graph: Graph, node: Node, by: str, level: str, what: str, condition: str) -> None:
    """Leave in *graph* a trace of what was done to *node*, a cast or an operator on weights."""
    owner = graph.owning_module
    if owner is None:
        return
    where = node.meta.get("where") or Where()
    edit = Edit(by, level, what, condition, node.name, where)
    owner.meta.setdefault(_KEY, []).append(edit)


def edits_of(module: GraphModule) -> tuple[Edit, ...]:
    """What was done to the graph of *module* and to those of the GraphModules inside it."""
    modules = [child for child in module.modules() if isinstance(child, GraphModule)]
    return tuple(edit for child in modules for edit in child.meta.get(_KEY, ()))
