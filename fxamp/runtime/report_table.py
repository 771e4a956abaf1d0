"""The table of a report, a line an operator below that of its module, and what is told once for many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from fxamp.ir.facts import Size
from fxamp.runtime.cast_history import RemovedCast
from fxamp.runtime.report_rows import OperatorRow

__all__ = ["reasons", "removals", "show_bytes", "table_of"]

_COLUMNS = ("operator", "dtypes", "rule", "casts", "bytes", "line")


def table_of(rows: Iterable[OperatorRow], *, several: bool) -> Table:
    """The table of *rows*, with the number of the graph if there are *several*."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in _COLUMNS:
        table.add_column(name, justify="right" if name == "bytes" else "left", overflow="fold")
    for (program, module), group in groupby(rows, lambda row: (row.program, row.where.module)):
        number = f"graph {program}  " if several else ""
        table.add_row(Text(f"{number}{module or 'the model'}", style="bold"))
        for row in group:
            table.add_row(*_cells(row))
    return table


def reasons(rows: Iterable[OperatorRow]) -> Iterator[str]:
    """A line for each reason, with the operators that it applies to."""
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.rule:
            found.setdefault(row.rule, {})[row.op] = None
    for rule, operators in found.items():
        yield f"{rule}  ({', '.join(operators)})"


def removals(casts: Iterable[RemovedCast]) -> Iterator[str]:
    """A line for each pass that has removed or moved some of *casts*, with the condition and their names."""
    found: dict[tuple[str, str, bool], list[RemovedCast]] = {}
    for cast in casts:
        found.setdefault((cast.by, cast.condition, cast.of_autocast), []).append(cast)
    for (by, condition, of_autocast), group in found.items():
        whose = "" if of_autocast else " of the model's own"
        names = ", ".join(f"%{cast.node}" for cast in group)
        yield f"by {by}, since {condition}: {len(group)}{whose}: {names}"


def show_bytes(size: Size) -> str:
    """A number of bytes for people: ``2.0 MiB``, ``4*s0 B``."""
    if not isinstance(size, int):
        return f"{size} B"
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} B"


def _cells(row: OperatorRow) -> tuple[str, ...]:
    types = f"{_short(row.inputs)} -> {_short(row.outputs)}"
    line = f"{Path(row.where.file).name}:{row.where.line}" if row.where.line else ""
    spared = dict.fromkeys(f"none to {cast.dtype}: {cast.by}" for cast in row.removed)
    casts = "\n".join([", ".join(map(str, row.casts)), *spared]).strip()
    return f"  {row.op}", types, row.policy, casts, show_bytes(row.bytes), line


def _short(dtypes: Iterable[str]) -> str:
    """``bf16 x3, f32`` for three and one."""
    return ", ".join(
        f"{name} x{count}" if (count := len(list(group))) > 1 else name for name, group in groupby(dtypes)
    )
