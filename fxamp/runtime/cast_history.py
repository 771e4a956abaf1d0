"""What became of the casts that eager autocast makes: how many there were, and which a pass has removed.

After ``insert-casts`` a graph has every cast of eager autocast, in its place.  What the clean-up passes do
from there on can only be told by looking on: a cast that is gone leaves nothing behind, and one that was
moved stands elsewhere, perhaps as two.  So the casts of eager autocast are counted before the first
clean-up, and not from what is left.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass

import sympy
from torch.fx import Graph, GraphModule, Node

from fxamp.ir.blocks import Checkpointed
from fxamp.ir.edits import edits_of
from fxamp.ir.facts import Size, fact_of_node
from fxamp.ir.operators import is_to_dtype
from fxamp.ir.where import Where
from fxamp.passes.base import Pass
from fxamp.passes.clean_up import CleanUp
from fxamp.passes.remove_dead_code import RemoveDeadCode

__all__ = ["CastHistory", "CastLog", "RemovedCast", "name_in", "named_graphs", "total"]


@dataclass(frozen=True)
class RemovedCast:
    """A cast that was in a graph and is there no more.

    Attributes:
        node: Its name.
        dtype: What it cast to.
        where: The operator that it was made for, or the line that wrote it.
        by: The pass that removed it.
        what: What the pass did with it: ``"shared with %x_bf16"``, say.
        condition: Why that keeps the bits, or what holds after that pass.
        bytes: What it would have written.
        of_autocast: Whether it was one that eager autocast makes; else the model wrote it.
        users: The names of the nodes that read it.
    """

    node: str
    dtype: str
    where: Where
    by: str
    what: str
    condition: str
    bytes: Size
    of_autocast: bool
    users: tuple[str, ...] = ()

    def __str__(self) -> str:
        whose = "" if self.of_autocast else ", written by the model"
        return (
            f"%{self.node} to {self.dtype}{whose}: {self.what} by {self.by}: {self.condition} ({self.where})"
        )


@dataclass(frozen=True)
class CastHistory:
    """The casts of one graph before clean-up, and those that went.

    Attributes:
        eager: How many casts eager autocast makes.
        eager_bytes: What they write, an expression in the sizes of the inputs.
        removed: The casts that are no more where they were.
    """

    eager: int = 0
    eager_bytes: Size = 0
    removed: tuple[RemovedCast, ...] = ()


@dataclass(frozen=True)
class _Seen:
    """What a cast was when it was seen last."""

    name: str
    dtype: str
    where: Where
    bytes: Size
    of_autocast: bool
    users: tuple[str, ...]

    def gone(self, by: str, what: str, condition: str) -> RemovedCast:
        kept = (self.bytes, self.of_autocast, self.users)
        return RemovedCast(self.name, self.dtype, self.where, by, what, condition, *kept)


class CastLog:
    """Looks at a graph after each pass; made to be given to ``run_passes``."""

    def __init__(self) -> None:
        self._removed: tuple[RemovedCast, ...] = ()
        self._there: dict[Node, _Seen] = {}
        self._eager: tuple[_Seen, ...] | None = None

    def __call__(self, step: Pass, module: GraphModule) -> None:
        """Note what *step* has removed from *module*."""
        if self._eager is None and isinstance(step, (CleanUp, RemoveDeadCode)):
            self._eager = self._of_autocast()
        now = {
            node: _seen(node, path)
            for path, graph in named_graphs(module)
            for node in graph.nodes
            if is_to_dtype(node)
        }
        gone = [seen for node, seen in self._there.items() if node not in now]
        if gone:
            self._removed += tuple(self._told(gone, step, module))
        self._there = now

    def history(self) -> CastHistory:
        """What has been seen so far."""
        eager = self._of_autocast() if self._eager is None else self._eager
        return CastHistory(len(eager), total(seen.bytes for seen in eager), self._removed)

    def _of_autocast(self) -> tuple[_Seen, ...]:
        return tuple(seen for seen in self._there.values() if seen.of_autocast)

    def _told(self, gone: list[_Seen], step: Pass, module: GraphModule) -> Iterator[RemovedCast]:
        """The casts that are *gone*, with what *step* tells of each, or else what holds after it."""
        edits = {edit.node: edit for edit in edits_of(module) if edit.by == step.name}
        after = (inspect.getdoc(type(step)) or "").splitlines()[0].rstrip(".")
        for seen in gone:
            edit = edits.get(seen.name.rpartition(".")[2])
            if edit is None:
                yield seen.gone(step.name, "removed", after)
            else:
                yield seen.gone(step.name, edit.what, edit.condition)


def named_graphs(module: GraphModule, path: str = "") -> Iterator[tuple[str, Graph]]:
    """The graphs that a forward pass runs: *module*'s own, at *path*, and those of its blocks."""
    yield path, module.graph
    for node in module.graph.nodes:
        if isinstance(node.target, Checkpointed):
            block = str(node.args[0].target)
            yield from named_graphs(getattr(module, block), f"{path}.{block}" if path else block)


def name_in(path: str, node: Node) -> str:
    """The name of *node* of the graph at *path* of a program: ``"block_0.linear"`` in a block."""
    return f"{path}.{node.name}" if path else node.name


def total(sizes: Iterator[Size]) -> Size:
    """The sum: an int, or an expression in the sizes of the inputs."""
    found: Size = 0
    for size in sizes:
        found = found + size
    return int(found) if not isinstance(found, sympy.Expr) or found.is_number else found


def _seen(node: Node, path: str) -> _Seen:
    fact = fact_of_node(node)
    of_autocast = "inserted" in node.meta
    return _Seen(
        name=name_in(path, node),
        dtype=fact.dtype.abbr if fact is not None else "?",
        where=node.meta.get("where") or Where(),
        bytes=fact.bytes if fact is not None and of_autocast else 0,
        of_autocast=of_autocast,
        users=tuple(name_in(path, user) for user in node.users),
    )
