"""The rows of a report: what is told of one operator, one cast, one graph and one eager piece.

A row is read off a rewritten graph and off the history of its casts.  An operator's row has the casts that
are written for it, and those that it would read had clean-up left them; a cast that serves several operators
is told once, at the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from fxamp.ir.blocks import CustomFunction
from fxamp.ir.facts import Fact, Size, dtype_names
from fxamp.ir.operators import operator_name
from fxamp.ir.regions import run_in_region
from fxamp.ir.where import Where, within
from fxamp.runtime.cast_history import CastHistory, RemovedCast, name_in, named_graphs, total
from fxamp.runtime.program import Program

__all__ = ["Cast", "EagerPiece", "GraphRow", "OperatorRow", "graph_row", "operator_rows"]


@dataclass(frozen=True)
class Cast:
    """One cast that is written in a graph.

    Attributes:
        value: The node that is cast.
        source: Its dtype.
        target: The dtype that it is cast to.
        bytes: What the cast writes, an expression in the sizes of the inputs.
        kept: Whether it is made once for all uses in a call, as eager autocast's weight cache does.
    """

    value: str
    source: str
    target: str
    bytes: Size
    kept: bool = False

    def __str__(self) -> str:
        return f"{self.value} {self.source}->{self.target}"


@dataclass(frozen=True)
class OperatorRow:
    """One operator of a graph.

    Attributes:
        program: Which graph, counted from 0.
        node: Its name there; that of the block before it, if it is in one.
        op: ``aten::linear``, ...
        where: Module path and source line.
        rule: The cast policy that applied and why, ``""`` where autocast leaves the operator alone.
        inputs: dtypes of its tensor arguments.
        outputs: dtypes of its results.
        casts: The casts that are written for it, one that several share at the first.
        bytes: Size of its results, an expression in the sizes of the inputs.
        removed: The casts that it would read, had clean-up not removed them.
    """

    program: int
    node: str
    op: str
    where: Where
    rule: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    casts: tuple[Cast, ...] = ()
    bytes: Size = 0
    removed: tuple[RemovedCast, ...] = ()

    def __str__(self) -> str:
        types = f"{', '.join(self.inputs)} -> {', '.join(self.outputs)}"
        return f"%{self.node}: {self.op}  {types}  {self.rule or 'no rule'}  ({self.where})"

    @property
    def policy(self) -> str:
        """The cast policy without its reason."""
        return self.rule.split(":")[0]

    @property
    def reason(self) -> str:
        """Why it applies."""
        return self.rule.partition(": ")[2]


@dataclass(frozen=True)
class GraphRow:
    """One graph, and which front end made it.

    Attributes:
        program: Its number.
        path: The module that was captured, ``""`` for the model itself.
        front_end: ``"recorded"``, or ``"recorded, a segment"`` of a call that reads values.
        reads: The operator at the end of a segment, whose values Python reads.
        operators: How many operators it has.
        casts: How many casts it makes a call.
        cast_bytes: What these write, an expression in the sizes of the inputs.
        eager_casts: How many casts eager autocast makes in its place.
        eager_cast_bytes: What those write.
        removed: The casts that clean-up took out of it, or moved.
    """

    program: int
    path: str
    front_end: str
    reads: str
    operators: int
    casts: int
    cast_bytes: Size = 0
    eager_casts: int = 0
    eager_cast_bytes: Size = 0
    removed: tuple[RemovedCast, ...] = ()

    def __str__(self) -> str:
        reads = f" that ends where Python reads {self.reads}" if self.reads else ""
        text = f"graph {self.program}: {self.path or 'the model'}, {self.front_end}{reads}: "
        return text + f"{self.operators} operators, {self.casts} casts (eager autocast: {self.eager_casts})"


@dataclass(frozen=True)
class EagerPiece:
    """A module whose Python runs eagerly, inside a real autocast region."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path or 'the model'}: {self.reason}"


# --- graphs -----------------------------------------------------------------------------------------


def graph_row(index: int, path: str, program: Program, module: GraphModule, *, goes_on: bool) -> GraphRow:
    """The row of *module*, one of the graphs of *program*, which was captured for the module at *path*.

    Args:
        index: The number of the graph.
        path: Of the module that was captured.
        program: What the graph is of.
        module: The graph.
        goes_on: Whether the program is what follows the reading of a value.
    """
    own, end = module is program.module, program.operator
    reads = ""
    if end is not None and own:
        calls = [node for node in end.module.graph.nodes if node.op == "call_function" and node.users]
        reads = operator_name(_called(calls[-1])) if calls else ""
    segment = "recorded, a segment" if end is not None or goes_on else "recorded"
    casts = [node for _, graph in named_graphs(module) for node in graph.nodes if "inserted" in node.meta]
    history = program.casts if own else CastHistory()
    return GraphRow(
        program=index,
        path=path,
        front_end=segment if own else "recorded, the operator that is read",
        reads=reads,
        operators=sum(1 for _ in _operators(module)),
        casts=len(casts),
        cast_bytes=total(fact.bytes for cast in casts for fact in _facts(cast.meta["fact"])),
        eager_casts=history.eager,
        eager_cast_bytes=history.eager_bytes,
        removed=history.removed,
    )


# --- operators --------------------------------------------------------------------------------------


def operator_rows(index: int, path: str, program: Program, module: GraphModule) -> list[OperatorRow]:
    """The rows of the operators of *module* and its blocks; arguments as for :func:`graph_row`."""
    removed = program.casts.removed if module is program.module else ()
    told: set[Node] = set()
    return [_row(index, path, name, node, told, removed) for name, node in _operators(module)]


def _operators(module: GraphModule) -> Iterator[tuple[str, Node]]:
    for block, graph in named_graphs(module):
        for node in graph.nodes:
            if node.op == "call_function" and node.meta.get("fact") is not None and _is_operator(node):
                yield name_in(block, node), node


def _is_operator(node: Node) -> bool:
    return "inserted" not in node.meta and operator_name(node.target) != "getitem"


def _called(node: Node) -> object:
    return node.args[1] if node.target is run_in_region else node.target


def _row(
    index: int, path: str, name: str, node: Node, told: set[Node], removed: Iterable[RemovedCast]
) -> OperatorRow:
    target = _called(node)
    decision = node.meta.get("decision")
    rule = "" if decision is None else str(decision)
    if node.target is run_in_region or isinstance(target, CustomFunction):
        why = "its kernel consults autocast itself" if decision is None else decision.rule.why
        rule = f"kept in a region: {why}"
    casts = [arg for arg in node.all_input_nodes if "inserted" in arg.meta and arg not in told]
    told.update(casts)
    return OperatorRow(
        program=index,
        node=name,
        op=operator_name(target),
        where=within(path, node.meta.get("where") or Where()),
        rule=rule,
        inputs=tuple(text for arg in node.all_input_nodes for text in dtype_names(arg.meta.get("fact"))),
        outputs=dtype_names(node.meta.get("fact")),
        casts=tuple(_cast(cast) for cast in casts),
        bytes=total(fact.bytes for fact in _facts(node.meta.get("fact"))),
        removed=tuple(cast for cast in removed if name in cast.users[:1]),
    )


def _cast(node: Node) -> Cast:
    (source,) = node.all_input_nodes
    (fact,), (before,) = _facts(node.meta["fact"]), _facts(source.meta["fact"])
    name = str(source.target) if source.op == "get_attr" else source.name
    return Cast(name, before.dtype.abbr, fact.dtype.abbr, fact.bytes, bool(node.meta.get("kept")))


def _facts(facts: Any) -> list[Fact]:
    if isinstance(facts, Fact):
        return [facts]
    return [found for fact in facts for found in _facts(fact)] if isinstance(facts, tuple) else []
