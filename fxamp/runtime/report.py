"""What was decided: the rule and dtypes of every operator, the casts, and what stayed eager and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from fxamp.capture.dtype_reads import ChangedRead
from fxamp.ir.blocks import CustomFunction
from fxamp.ir.facts import Fact
from fxamp.ir.operators import operator_name
from fxamp.ir.regions import run_in_region
from fxamp.ir.where import Where
from fxamp.runtime.recapture import Recapture
from fxamp.runtime.runner import Runner

__all__ = ["EagerPiece", "OperatorRow", "Report", "report_on"]


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
    """

    program: int
    node: str
    op: str
    where: Where
    rule: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __str__(self) -> str:
        types = f"{', '.join(self.inputs)} -> {', '.join(self.outputs)}"
        return f"%{self.node}: {self.op}  {types}  {self.rule or 'no rule'}  ({self.where})"


@dataclass(frozen=True)
class EagerPiece:
    """A module whose Python runs eagerly, inside a real autocast region."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path or 'the model'}: {self.reason}"


@dataclass(frozen=True)
class Report:
    """Everything that ``amp.report()`` tells.

    Attributes:
        operators: One row an operator, casts left out.
        casts: How many casts each graph makes a call.
        eager: The pieces that are not in a graph.
        recaptures: Why modules were captured again, the latest last.
        changed_reads: Where the model's Python reads another dtype because of an override.
        plan_differences: How graphs differ from those of the plan that the policy comes from.
    """

    operators: tuple[OperatorRow, ...]
    casts: tuple[int, ...]
    eager: tuple[EagerPiece, ...]
    recaptures: tuple[Recapture, ...] = ()
    changed_reads: tuple[ChangedRead, ...] = ()
    plan_differences: tuple[str, ...] = ()

    @property
    def totals(self) -> dict[str, int]:
        """Operators by cast policy, over all graphs; the empty key counts those without a rule."""
        return dict(Counter(row.rule.split(":")[0] for row in self.operators))

    def __str__(self) -> str:
        lines = [str(row) for row in self.operators]
        totals = sorted(self.totals.items())
        counts = ", ".join(f"{count} {rule or 'without a rule'}" for rule, count in totals)
        lines.append(f"{len(self.casts)} graphs, {sum(self.casts)} casts; operators: {counts or 'none'}")
        lines += [f"eager: {piece}" for piece in self.eager]
        lines += [f"captured again: {recapture}" for recapture in self.recaptures]
        lines += [str(read) for read in self.changed_reads]
        lines += [f"not as planned: {difference}" for difference in self.plan_differences]
        return "\n".join(lines)


def report_on(runner: Runner) -> Report:
    """The report on *runner* and all runners below it."""
    runners = runner.tree()
    modules = [module for r in runners for program in r.all_programs() for module in program.modules()]
    return Report(
        operators=tuple(row for index, module in enumerate(modules) for row in _rows(index, module)),
        casts=tuple(_count_casts(module) for module in modules),
        eager=tuple(
            EagerPiece(r.path, failure.reason)
            for r in runners
            for failure in dict.fromkeys(r.failures.values())
        ),
        recaptures=tuple(runner.recaptures.log),
        changed_reads=runner.findings.changed_reads,
        plan_differences=runner.findings.plan_differences,
    )


def _count_casts(module: GraphModule) -> int:
    return sum("inserted" in node.meta for node in module.graph.nodes)


def _rows(index: int, module: GraphModule) -> list[OperatorRow]:
    return [
        _row(index, node)
        for node in module.graph.nodes
        if node.op == "call_function" and node.meta.get("fact") is not None and _is_operator(node)
    ]


def _is_operator(node: Node) -> bool:
    return "inserted" not in node.meta and operator_name(node.target) != "getitem"


def _row(index: int, node: Node) -> OperatorRow:
    target = node.args[1] if node.target is run_in_region else node.target
    decision = node.meta.get("decision")
    rule = f"{decision.rule.cast.value}: {decision.rule.why}" if decision is not None else ""
    if node.target is run_in_region or isinstance(target, CustomFunction):
        rule = "kept in a region: its kernel consults autocast itself"
    return OperatorRow(
        program=index,
        node=node.name,
        op=operator_name(target),
        where=node.meta.get("where") or Where(),
        rule=rule,
        inputs=tuple(text for arg in node.all_input_nodes for text in _dtypes(arg.meta.get("fact"))),
        outputs=_dtypes(node.meta.get("fact")),
    )


def _dtypes(facts: Any) -> tuple[str, ...]:
    if isinstance(facts, Fact):
        return (facts.dtype.abbr,)
    if isinstance(facts, tuple):
        return tuple(text for fact in facts for text in _dtypes(fact))
    return ()
