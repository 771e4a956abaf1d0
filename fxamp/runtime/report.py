"""What was decided: the rule and dtypes of every operator, the casts, and what stayed eager and why."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import sympy
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch.fx import GraphModule, Node

from fxamp.capture.dtype_reads import ChangedRead
from fxamp.ir.blocks import CustomFunction
from fxamp.ir.facts import Fact, Size, dtype_names
from fxamp.ir.operators import operator_name
from fxamp.ir.regions import run_in_region
from fxamp.ir.render import as_html, as_text
from fxamp.ir.where import Where, within
from fxamp.runtime.program import Program
from fxamp.runtime.recapture import Recapture
from fxamp.runtime.removed_casts import RemovedCast
from fxamp.runtime.runner import Runner

__all__ = ["Cast", "EagerPiece", "GraphRow", "OperatorRow", "Report", "report_on"]


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
        node: Its name there.
        op: ``aten::linear``, ...
        where: Module path and source line.
        rule: The cast policy that applied and why, ``""`` where autocast leaves the operator alone.
        inputs: dtypes of its tensor arguments.
        outputs: dtypes of its results.
        casts: The casts that are written for it, one that several share at the first.
        bytes: Size of its results, an expression in the sizes of the inputs.
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
        removed: The casts that clean-up took out of it.
    """

    program: int
    path: str
    front_end: str
    reads: str
    operators: int
    casts: int
    removed: tuple[RemovedCast, ...] = ()

    def __str__(self) -> str:
        reads = f" that ends where Python reads {self.reads}" if self.reads else ""
        text = f"graph {self.program}: {self.path or 'the model'}, {self.front_end}{reads}: "
        return text + f"{self.operators} operators, {self.casts} casts"


@dataclass(frozen=True)
class EagerPiece:
    """A module whose Python runs eagerly, inside a real autocast region."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path or 'the model'}: {self.reason}"


@dataclass(frozen=True)
class Report:
    """Everything that ``amp.report()`` tells.  ``print`` it, show it in a notebook, or take :meth:`to_json`.

    Attributes:
        operators: One row an operator, casts left out.
        casts: How many casts each graph makes a call.
        eager: The pieces that are not in a graph.
        recaptures: Why modules were captured again, the latest last.
        changed_reads: Where the model's Python reads another dtype because of an override.
        plan_differences: How graphs differ from those of the plan that the policy comes from.
        graphs: One row a graph.
    """

    operators: tuple[OperatorRow, ...]
    casts: tuple[int, ...]
    eager: tuple[EagerPiece, ...]
    recaptures: tuple[Recapture, ...] = ()
    changed_reads: tuple[ChangedRead, ...] = ()
    plan_differences: tuple[str, ...] = ()
    graphs: tuple[GraphRow, ...] = ()

    @property
    def totals(self) -> dict[str, int]:
        """Operators by cast policy, over all graphs; the empty key counts those without a rule."""
        return dict(Counter(row.policy for row in self.operators))

    @property
    def eager_casts(self) -> int:
        """How many casts eager autocast makes where the graphs make :attr:`casts`, all graphs together."""
        return sum(self.casts) + sum(cast.of_autocast for graph in self.graphs for cast in graph.removed)

    @property
    def cast_bytes(self) -> Size:
        """What the casts of all graphs write, an expression in the sizes of the inputs."""
        return _sum(cast.bytes for row in self.operators for cast in row.casts)

    @property
    def eager_cast_bytes(self) -> Size:
        """What the casts of eager autocast write in their place."""
        removed = (cast for graph in self.graphs for cast in graph.removed)
        return _sum([self.cast_bytes, *(cast.bytes for cast in removed if cast.of_autocast)])

    # --- for people ---------------------------------------------------------------------------------

    def __rich__(self) -> RenderableType:
        return Group(*self._parts())

    def __str__(self) -> str:
        return as_text(self._parts())

    def _repr_html_(self) -> str:
        return as_html(self)

    def _parts(self) -> Iterator[RenderableType]:
        if self.operators:
            yield _table(self.operators, several=len(self.casts) > 1)
            yield from map(Text, _reasons(self.operators))
        yield from map(Text, self._summary())

    def _summary(self) -> Iterator[str]:
        yield from map(str, self.graphs)
        for graph in self.graphs:
            yield from (f"removed from graph {graph.program}: {cast}" for cast in graph.removed)
        totals = sorted(self.totals.items())
        counts = ", ".join(f"{count} {rule or 'without a rule'}" for rule, count in totals)
        yield f"{len(self.casts)} graphs, {sum(self.casts)} casts; operators: {counts or 'none'}"
        written, eager = show_bytes(self.cast_bytes), show_bytes(self.eager_cast_bytes)
        yield f"casts by eager autocast: {self.eager_casts}, which write {eager}"
        yield f"casts in the graphs: {sum(self.casts)}, which write {written}"
        yield from (f"eager: {piece}" for piece in self.eager)
        yield from (f"captured again: {recapture}" for recapture in self.recaptures)
        yield from map(str, self.changed_reads)
        yield from (f"not as planned: {difference}" for difference in self.plan_differences)

    # --- for programs -------------------------------------------------------------------------------

    def to_json(self, indent: int | None = 2) -> str:
        """All of it as JSON; bytes that depend on sizes are expressions, as strings."""
        found = asdict(self)
        found["totals"] = self.totals
        found["eager_casts"] = self.eager_casts
        found["cast_bytes"], found["eager_cast_bytes"] = self.cast_bytes, self.eager_cast_bytes
        return json.dumps(found, indent=indent, default=str)


# --- the table --------------------------------------------------------------------------------------


def _table(rows: tuple[OperatorRow, ...], *, several: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("operator", overflow="fold")
    table.add_column("dtypes", overflow="fold")
    table.add_column("rule", overflow="fold")
    table.add_column("casts", overflow="fold")
    table.add_column("bytes", justify="right", overflow="fold")
    table.add_column("line", overflow="fold")
    for (program, module), group in groupby(rows, lambda row: (row.program, row.where.module)):
        number = f"graph {program}  " if several else ""
        table.add_row(Text(f"{number}{module or 'the model'}", style="bold"))
        for row in group:
            table.add_row(*_cells(row))
    return table


def _cells(row: OperatorRow) -> tuple[str, ...]:
    types = f"{_short(row.inputs)} -> {_short(row.outputs)}"
    line = f"{Path(row.where.file).name}:{row.where.line}" if row.where.line else ""
    casts = ", ".join(map(str, row.casts))
    return f"  {row.op}", types, row.policy, casts, show_bytes(row.bytes), line


def _short(dtypes: Iterable[str]) -> str:
    """``bf16 x3, f32`` for three and one."""
    return ", ".join(
        f"{name} x{count}" if (count := len(list(group))) > 1 else name for name, group in groupby(dtypes)
    )


def _reasons(rows: Iterable[OperatorRow]) -> Iterator[str]:
    """A line for each reason, with the operators that it applies to."""
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.rule:
            found.setdefault(row.rule, {})[row.op] = None
    for rule, operators in found.items():
        yield f"{rule}  ({', '.join(operators)})"


def show_bytes(size: Size) -> str:
    """A number of bytes for people: ``2.0 MiB``, ``4*s0 B``."""
    if not isinstance(size, int):
        return f"{size} B"
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} B"


# --- from the runners -------------------------------------------------------------------------------


def report_on(runner: Runner) -> Report:
    """The report on *runner* and all runners below it."""
    runners = runner.tree()
    programs = [(r.path, program) for r in runners for program in r.all_programs()]
    graphs = [(path, program, module) for path, program in programs for module in program.modules()]
    later = {id(branch.program) for _, program in programs for branch in program.branches}
    return Report(
        operators=tuple(
            row for index, (path, _, module) in enumerate(graphs) for row in _rows(index, path, module)
        ),
        casts=tuple(_count_casts(module) for _, _, module in graphs),
        eager=tuple(
            EagerPiece(r.path, failure.reason)
            for r in runners
            for failure in dict.fromkeys(r.failures.values())
        ),
        recaptures=tuple(runner.recaptures.log),
        changed_reads=runner.findings.changed_reads,
        plan_differences=runner.findings.plan_differences,
        graphs=tuple(
            _graph_row(index, path, program, module, goes_on=id(program) in later)
            for index, (path, program, module) in enumerate(graphs)
        ),
    )


def _count_casts(module: GraphModule) -> int:
    return sum("inserted" in node.meta for node in module.graph.nodes)


def _graph_row(index: int, path: str, program: Program, module: GraphModule, *, goes_on: bool) -> GraphRow:
    own, end = module is program.module, program.operator
    reads = ""
    if end is not None and own:
        calls = [node for node in end.module.graph.nodes if node.op == "call_function" and node.users]
        reads = operator_name(_called(calls[-1])) if calls else ""
    segment = "recorded, a segment" if end is not None or goes_on else "recorded"
    return GraphRow(
        program=index,
        path=path,
        front_end=segment if own else "recorded, the operator that is read",
        reads=reads,
        operators=len(_rows(index, path, module)),
        casts=_count_casts(module),
        removed=program.removed if own else (),
    )


def _called(node: Node) -> object:
    return node.args[1] if node.target is run_in_region else node.target


def _rows(index: int, path: str, module: GraphModule) -> list[OperatorRow]:
    told: set[Node] = set()
    return [
        _row(index, path, node, told)
        for node in module.graph.nodes
        if node.op == "call_function" and node.meta.get("fact") is not None and _is_operator(node)
    ]


def _is_operator(node: Node) -> bool:
    return "inserted" not in node.meta and operator_name(node.target) != "getitem"


def _row(index: int, path: str, node: Node, told: set[Node]) -> OperatorRow:
    target = _called(node)
    decision = node.meta.get("decision")
    rule = "" if decision is None else str(decision)
    if node.target is run_in_region or isinstance(target, CustomFunction):
        rule = "kept in a region: its kernel consults autocast itself"
    casts = [arg for arg in node.all_input_nodes if "inserted" in arg.meta and arg not in told]
    told.update(casts)
    return OperatorRow(
        program=index,
        node=node.name,
        op=operator_name(target),
        where=within(path, node.meta.get("where") or Where()),
        rule=rule,
        inputs=tuple(text for arg in node.all_input_nodes for text in dtype_names(arg.meta.get("fact"))),
        outputs=dtype_names(node.meta.get("fact")),
        casts=tuple(_cast(cast) for cast in casts),
        bytes=_sum(fact.bytes for fact in _facts(node.meta.get("fact"))),
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


def _sum(sizes: Iterable[Size]) -> Size:
    total: Any = 0
    for size in sizes:
        total = total + size
    return int(total) if not isinstance(total, sympy.Expr) or total.is_number else total
