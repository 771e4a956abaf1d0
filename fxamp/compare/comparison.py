"""What ``fxamp.compare`` found: the plain answer first, then the operators, the worst first."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fxamp.compare.kinds import Finding
from fxamp.compare.rows import Row, ranked
from fxamp.compare.statistics import ULP_BOUNDS, Statistics
from fxamp.ir.render import as_html, as_text
from fxamp.ir.where import Where

__all__ = ["Bits", "Comparison", "NonFinite"]

_SHOWN = 10
_EXPLAINED = 5


@dataclass(frozen=True)
class Bits:
    """The answer to: does the converted model do what eager autocast does?

    Attributes:
        equal: Whether all results have the same bits; ``None`` where there is nothing to compare with.
        detail: Why not, or where the two first part.
    """

    equal: bool | None
    detail: str = ""

    def __str__(self) -> str:
        answer = {True: "yes", False: "NO", None: "not compared"}[self.equal]
        return f"Bits equal to eager autocast: {answer}{f'; {self.detail}' if self.detail else ''}"


@dataclass(frozen=True)
class NonFinite:
    """The first result that is Inf or NaN where the reference is finite.

    Attributes:
        row: The operator.
        input: The index of the input.
    """

    row: Row
    input: int

    def __str__(self) -> str:
        return f"First Inf or NaN: {self.row.op} ({self.row.where}), input {self.input}"


@dataclass(frozen=True)
class Comparison:
    """Everything that ``fxamp.compare`` tells.  ``print`` it, or look at :meth:`worst`.

    Attributes:
        what: What was run, for people: the policy.
        reference: What it was compared with: ``"float32"``, ``"float64"``; ``""`` for bits alone.
        bits: Whether the converted model has the bits of eager autocast.
        rows: The operators, in the order of their first calls.
        outputs: The results of the model against the reference.
        first_nonfinite: The first operator whose result is not finite.
        inputs: How many inputs were run.
        boundaries: Parts that were compared at their boundaries only, and why.
        apart: Operators after which the reference had to go on from the values of the run, and why.
        loss_scale: That of the gradients; ``None`` if none were compared.
        notes: What else is to be known.
    """

    what: str
    reference: str
    bits: Bits
    rows: tuple[Row, ...]
    outputs: Statistics | None
    first_nonfinite: NonFinite | None
    inputs: int
    boundaries: tuple[str, ...] = ()
    apart: tuple[tuple[str, str], ...] = ()
    loss_scale: float | None = None
    notes: tuple[str, ...] = ()

    @cached_property
    def ranking(self) -> tuple[Row, ...]:
        """All operators, the worst first (:func:`fxamp.compare.rows.ranked`)."""
        return tuple(ranked(self.rows))

    def worst(self, count: int = _SHOWN) -> tuple[Row, ...]:
        """The *count* worst operators."""
        return self.ranking[:count]

    @property
    def findings(self) -> tuple[tuple[Row, Finding], ...]:
        """All findings, those of the worst operators first."""
        return tuple((row, finding) for row in self.ranking for finding in row.findings)

    @property
    def min_sqnr(self) -> float:
        """The signal to noise ratio of the model's results in dB; ``-inf`` if any is not finite."""
        if self.outputs is None:
            return math.inf
        return -math.inf if self.outputs.nan or self.outputs.inf else self.outputs.sqnr_db

    @property
    def max_ulp(self) -> float:
        """The largest error of the model's results, up to which bin of the histogram; may be ``inf``."""
        if self.outputs is None:
            return 0.0
        if self.outputs.nan or self.outputs.inf or self.outputs.max_ulp < 0:
            return math.inf
        return float(self.outputs.max_ulp)

    # --- for people ---------------------------------------------------------------------------------

    def __rich__(self) -> RenderableType:
        return Group(*self._parts())

    def __str__(self) -> str:
        return as_text(self._parts())

    def _repr_html_(self) -> str:
        return as_html(self)

    def _parts(self) -> list[RenderableType]:
        parts: list[RenderableType] = [Text(str(self.bits), style="bold")]
        plural = "s" if self.inputs != 1 else ""
        if self.reference:
            parts.append(Text(f"{self.what} against {self.reference}, {self.inputs} input{plural}"))
        if self.outputs is not None:
            parts.append(Text(f"Results: {_summary(self.outputs)}"))
        parts += [Text(str(self.first_nonfinite), style="bold red")] if self.first_nonfinite else []
        parts += [self._table()] if self.rows else []
        parts += [Text(line) for line in self._explanations()]
        parts += [Text(f"at its boundaries only: {text}") for text in self.boundaries]
        parts += [
            Text(f"from here on the run's own values: {place}: {why}") for place, why in self.apart[:_SHOWN]
        ]
        return [*parts, *(Text(note) for note in self.notes)]

    def _table(self) -> Table:
        title = "The worst operators (adds: fed the reference's inputs; arrives: in the run)"
        table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
        table.add_column("", no_wrap=True)
        table.add_column("operator", overflow="fold", max_width=14)
        table.add_column("where", overflow="fold", min_width=30)
        table.add_column("dtype", no_wrap=True)
        for name in ("adds dB", "arrives dB", "Inf, NaN"):
            table.add_column(name, justify="right", no_wrap=True)
        if self.loss_scale is not None:
            table.add_column("grad dB", justify="right", no_wrap=True)
        table.add_column("kind", overflow="fold", min_width=14)
        for place, row in enumerate(self.worst(), 1):
            table.add_row(*self._cells(place, row), style="red" if row.tier == 3 else "")
        return table

    def _cells(self, place: int, row: Row) -> list[str]:
        cells = [
            str(place),
            row.op.removeprefix("aten::") + (f" x{row.calls}" if row.calls > self.inputs else ""),
            _place(row.where),
            row.dtype,
            _decibels(row.local),
            _decibels(row.arrived),
            _share(row.arrived.nan + row.arrived.inf),
        ]
        if self.loss_scale is not None:
            cells.append(_decibels(row.gradient))
        return [*cells, ", ".join(finding.kind.value for finding in row.findings) or "rounding"]

    def _explanations(self) -> list[str]:
        lines = []
        for place, row in enumerate(self.worst(_EXPLAINED), 1):
            lines += [f"{place:>2}  {finding}" for finding in row.findings]
            if row.findings:
                lines.append(f"    -> {row.findings[0].kind.help}")
                if row.where.source:
                    lines.append(f"    {row.where.source}")
        return lines

    # --- for programs -------------------------------------------------------------------------------

    def to_json(self, indent: int | None = 2) -> str:
        """All of it as JSON; what is no number there is a string: ``"inf"``, ``"-inf"``, ``"nan"``."""
        return json.dumps(self._as_dict(), indent=indent)

    def _as_dict(self) -> dict[str, Any]:
        places = {row.index: place for place, row in enumerate(self.ranking, 1)}
        rows = [{"rank": places[row.index], **asdict(row)} for row in self.rows]
        first = self.first_nonfinite
        found: dict[str, Any] = _plain(
            {
                "what": self.what,
                "reference": self.reference,
                "bits_equal": self.bits.equal,
                "bits_detail": self.bits.detail,
                "inputs": self.inputs,
                "outputs": asdict(self.outputs) if self.outputs else None,
                "first_nonfinite": {"row": first.row.index, "input": first.input} if first else None,
                "loss_scale": self.loss_scale,
                "ulp_bounds": ULP_BOUNDS,
                "boundaries": self.boundaries,
                "apart": self.apart,
                "notes": self.notes,
                "rows": rows,
            }
        )
        return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return getattr(value, "value", value)


def _place(where: Where) -> str:
    line = f"{Path(where.file).name}:{where.line}" if where.line else ""
    return "\n".join(part for part in (where.module, line) if part) or "?"


def _decibels(statistics: Statistics | None) -> str:
    if statistics is None or not statistics.count:
        return "-"
    if statistics.nan or statistics.inf:
        return "Inf, NaN"
    return "exact" if statistics.sqnr_db == math.inf else f"{statistics.sqnr_db:.1f}"


def _share(share: float) -> str:
    return "" if not share else f"{share:.1%}" if share >= 0.001 else f"{share:.0e}"


def _summary(statistics: Statistics) -> str:
    bad = statistics.nan + statistics.inf
    if bad:
        return f"{_share(bad)} of the elements are Inf or NaN where the reference is finite"
    largest = "more than 256" if statistics.max_ulp < 0 else f"at most {statistics.max_ulp}"
    text = f"SQNR {_decibels(statistics)}{' dB' if math.isfinite(statistics.sqnr_db) else ''}, "
    text += f"max abs error {statistics.max_abs:.3g}, max rel {statistics.max_rel:.3g}, {largest} ulp"
    return text
