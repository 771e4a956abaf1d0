"""What was decided: the rule and dtypes of every operator, the casts, and what stayed eager and why.

The rows are in ``report_rows.py``, how they are shown as a table in ``report_table.py``.  Casts are counted
as the graphs have them; what runs eagerly makes those of eager autocast, and is not counted on either side.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from fxamp.capture.dtype_reads import ChangedRead
from fxamp.ir.facts import Size
from fxamp.ir.render import as_html, as_text
from fxamp.runtime.cast_history import total
from fxamp.runtime.recapture import Recapture
from fxamp.runtime.report_rows import Cast, EagerPiece, GraphRow, OperatorRow, graph_row, operator_rows
from fxamp.runtime.report_table import reasons, removals, show_bytes, table_of
from fxamp.runtime.runner import Runner

__all__ = ["Cast", "EagerPiece", "GraphRow", "OperatorRow", "Report", "report_on"]


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
        return sum(graph.eager_casts for graph in self.graphs)

    @property
    def cast_bytes(self) -> Size:
        """What the casts of all graphs write, an expression in the sizes of the inputs."""
        return total(graph.cast_bytes for graph in self.graphs)

    @property
    def eager_cast_bytes(self) -> Size:
        """What the casts of eager autocast write in their place."""
        return total(graph.eager_cast_bytes for graph in self.graphs)

    # --- for people ---------------------------------------------------------------------------------

    def __rich__(self) -> RenderableType:
        return Group(*self._parts())

    def __str__(self) -> str:
        return as_text(self._parts())

    def _repr_html_(self) -> str:
        return as_html(self)

    def _parts(self) -> Iterator[RenderableType]:
        if self.operators:
            yield table_of(self.operators, several=len(self.casts) > 1)
            yield from map(Text, reasons(self.operators))
        yield from map(Text, self._summary())

    def _summary(self) -> Iterator[str]:
        yield from map(str, self.graphs)
        for graph in self.graphs:
            yield from (f"removed from graph {graph.program} {text}" for text in removals(graph.removed))
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


# --- from the runners -------------------------------------------------------------------------------


def report_on(runner: Runner) -> Report:
    """The report on *runner* and all runners below it."""
    runners = runner.tree()
    programs = [(r.path, program) for r in runners for program in r.all_programs()]
    graphs = [(path, program, module) for path, program in programs for module in program.modules()]
    later = {id(branch.program) for _, program in programs for branch in program.branches}
    rows = tuple(
        graph_row(index, path, program, module, goes_on=id(program) in later)
        for index, (path, program, module) in enumerate(graphs)
    )
    return Report(
        operators=tuple(row for index, graph in enumerate(graphs) for row in operator_rows(index, *graph)),
        casts=tuple(row.casts for row in rows),
        eager=tuple(
            EagerPiece(r.path, failure.reason)
            for r in runners
            for failure in dict.fromkeys(r.failures.values())
        ),
        recaptures=tuple(runner.recaptures.log),
        changed_reads=runner.findings.changed_reads,
        plan_differences=runner.findings.plan_differences,
        graphs=rows,
    )
