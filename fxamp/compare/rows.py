"""What is being counted for each operator while the run goes on, and what is told of it in the end."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from fxamp.compare.kinds import Finding, Kind
from fxamp.compare.sites import Site
from fxamp.compare.statistics import Statistics, Tally
from fxamp.ir.where import Where

__all__ = ["Count", "Row", "ranked"]


@dataclass(frozen=True)
class Row:
    """One operator of the program, over all its calls.

    Attributes:
        index: Its place in the order of first calls.
        op: ``aten::linear``, ...
        where: Module path and source line.
        node: Its name in the graph of a converted model, else ``""``.
        calls: How often it was called.
        dtype: The dtype of its result in the run, as in a graph: ``bf16``.
        arrived: Its results against the reference.
        local: Its results when it is fed the reference's inputs; ``None`` where that tells nothing.
        gradient: The gradients of its results against the reference's, the loss scale taken out.
        wide: Its results against the second reference, float64.
        findings: What is wrong with it, the worst first.
        score: What it is ranked by, within the tier of its findings.
    """

    index: int
    op: str
    where: Where
    node: str
    calls: int
    dtype: str
    arrived: Statistics
    local: Statistics | None
    gradient: Statistics | None
    wide: Statistics | None
    findings: tuple[Finding, ...]
    score: float

    @property
    def kind(self) -> Kind | None:
        """The worst of its findings."""
        return self.findings[0].kind if self.findings else None

    @property
    def tier(self) -> int:
        """That of its worst finding, 0 without one."""
        return max((finding.kind.tier for finding in self.findings), default=0)


@dataclass(eq=False)
class Count:
    """A row that is being counted."""

    site: Site
    index: int
    calls: int = 0
    dtype: str = ""
    arrived: Tally = field(default_factory=Tally)
    local: Tally = field(default_factory=Tally)
    gradient: Tally = field(default_factory=Tally)
    findings: dict[Kind, Finding] = field(default_factory=dict)
    blame: float = 0.0
    lost: int = 0
    updates: int = 0

    def find(self, finding: Finding) -> None:
        """Note a finding; of each kind the first is kept."""
        self.findings.setdefault(finding.kind, finding)

    def refine(self, finding: Finding) -> None:
        """Note a finding whose numbers grow from call to call; the latest is kept, with the first time."""
        first = self.findings.get(finding.kind, finding)
        self.findings[finding.kind] = replace(finding, input=first.input, order=first.order)

    def read(self, wide: Statistics | None) -> Row:
        """The row."""
        found = list(self.findings.values())
        if any(finding.kind.tier > 1 for finding in found):  # which explain it
            found = [finding for finding in found if finding.kind is not Kind.AMPLIFIED]
        order = sorted(found, key=lambda finding: (-finding.kind.tier, finding.order))
        noise = self.local.noise
        if any(finding.kind in (Kind.SATURATED, Kind.STALLED) for finding in order):
            noise = max(noise, self.arrived.noise)
        if self.gradient.count:
            noise = max(noise, min(self.gradient.noise, 1.0) if _of_gradients(order) else 0.0)
        return Row(
            index=self.index,
            op=self.site.op,
            where=self.site.where,
            node=self.site.node,
            calls=self.calls,
            dtype=self.dtype,
            arrived=self.arrived.read(),
            local=self.local.read() if self.local.count else None,
            gradient=self.gradient.read() if self.gradient.count else None,
            wide=wide,
            findings=tuple(order),
            score=max(noise, self.blame),
        )


def _of_gradients(findings: Iterable[Finding]) -> bool:
    return any(found.kind is Kind.GRADIENT_UNDERFLOW for found in findings)


def ranked(rows: Iterable[Row]) -> list[Row]:
    """The worst first.

    What makes Inf or NaN comes before what is finite and wrong, and that before rounding.  Of the first kind
    the order is that in which they happened, since later ones follow from earlier ones; of the others it is
    the error that the operator adds.
    """
    return sorted(rows, key=_rank)


def _rank(row: Row) -> tuple[float, ...]:
    if row.tier == 3:
        return (-3, min(found.order for found in row.findings if found.kind.tier == 3), row.index)
    score = row.score if not math.isnan(row.score) else math.inf
    return (-max(row.tier, 1), -score, row.index)
