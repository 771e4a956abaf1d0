"""What must hold of the sizes and numbers of a call for a program to serve it.

What Python decided from symbolic sizes while a call was recorded (``if``, ``range``, ``int``) is in the shape
environment's guards; ``shape_guard`` turns those into one function of the real sizes.  A call that fails it
is captured again.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.printers import PythonPrinter

from fxamp.capture.numbers import called, is_float, needed, number_text
from fxamp.capture.symbols import SymbolicNumber
from fxamp.errors import CaptureError
from fxamp.ir.text import tuple_text

__all__ = ["Extent", "Guard", "Opening", "shape_guard"]


@dataclass(frozen=True)
class Extent:
    """The sizes of a fake tensor, which stay symbolic once a real tensor has taken the place of the fake.

    Attributes:
        shape: Its sizes.
        stride: Its strides; none where it has another layout.
    """

    shape: tuple[int | torch.SymInt, ...]
    stride: tuple[int | torch.SymInt, ...]

    @classmethod
    def of(cls, value: object) -> object:
        """The extent of *value* if it is a tensor, else *value*."""
        if not isinstance(value, torch.Tensor):
            return value
        return cls(tuple(value.shape), value.stride() if value.layout == torch.strided else ())


@dataclass(frozen=True)
class Opening:
    """The values that a segment of a program begins with, and the sizes that are read from them.

    Attributes:
        values: The inputs of the call, or what the operator at the end of the segment before gave: extents
            of tensors and symbolic numbers.
        known: The symbols that earlier segments have read, in order.
        decided: How many guards the shape environment had before.
        outcomes: Likewise, how many outcomes of decisions on floating point numbers.
    """

    values: tuple[object, ...]
    known: tuple[sympy.Symbol, ...] = ()
    decided: int = 0
    outcomes: int = 0

    @property
    def symbols(self) -> tuple[sympy.Symbol, ...]:
        """All symbols known once the segment has begun, in order."""
        return (*self.known, *(symbol for _, symbol in self.reads()[0]))

    def reads(self) -> tuple[list[tuple[str, sympy.Symbol]], list[str]]:
        """How to read each new symbol from the values, as text over ``x``, and the equalities of sizes."""
        reads: list[tuple[str, sympy.Symbol]] = []
        conditions: list[str] = []
        known = set(self.known)
        for name, value, is_size in self._numbers():
            if isinstance(value, sympy.Symbol) and value not in known:
                known.add(value)
                reads.append((name, value))
            elif is_size:
                conditions.append(f"{name} == {value}")
        return reads, conditions

    def numbers(self) -> dict[sympy.Symbol, Any]:
        """By symbol, the symbolic number among the values and their sizes that it is."""
        found: dict[sympy.Symbol, Any] = {}
        for value in self.values:
            candidates = [*value.shape, *value.stride] if isinstance(value, Extent) else [value]
            for number in candidates:
                if isinstance(number, SymbolicNumber) and isinstance(number.node._expr, sympy.Symbol):
                    found.setdefault(number.node._expr, number)
        return found

    def _numbers(self) -> Iterator[tuple[str, object, bool]]:
        for index, value in enumerate(self.values):
            if isinstance(value, SymbolicNumber):
                yield from _first_and_now(f"x[{index}]", value)
            if isinstance(value, Extent):
                yield from _sizes("size", index, value.shape)
                yield from _sizes("stride", index, value.stride)


def _sizes(query: str, index: int, sizes: Sequence[int | torch.SymInt]) -> Iterator[tuple[str, object, bool]]:
    for dim, size in enumerate(sizes):
        read = f"x[{index}].{query}({dim})"
        if isinstance(size, SymbolicNumber):
            yield from _first_and_now(read, size)
        else:
            yield read, size, query == "size"


def _first_and_now(read: str, number: Any) -> Iterator[tuple[str, object, bool]]:
    """What a symbolic number was at first, and what it has been found equal to since."""
    first, now = number.node._expr, number.node.expr
    if isinstance(first, sympy.Symbol):
        yield read, first, False
    yield read, now, now != first and ".stride(" not in read


@dataclass(frozen=True)
class Guard:
    """Whether a segment of a program serves values of given sizes.

    Attributes:
        conditions: What must hold, as Python text over ``s0, s1, ...`` style symbols, for people.
        holds: The test itself for the first segment, of the input tensors.
        bind: ``bind(known, values)``: the numbers that all symbols stand for, in order, or ``None`` if a
            condition does not hold; *known* are those of the symbols that were known before.
        reads: Each symbol, and how it is read from the values ``x``.
    """

    conditions: tuple[str, ...]
    holds: Callable[[Sequence[torch.Tensor]], bool]
    bind: Callable[[Sequence[Any], Sequence[Any]], tuple[Any, ...] | None]
    reads: tuple[tuple[str, str], ...] = ()

    def broken(self, inputs: Sequence[torch.Tensor], names: Sequence[str]) -> str:
        """The first condition that *inputs* break, about them by *names*; ``""`` if they break none."""
        scope = {"math": math, "x": inputs}
        scope |= {symbol: eval(read, scope) for symbol, read in self.reads}
        for condition in self.conditions:
            if not eval(condition, scope):
                for symbol, read in self.reads:
                    condition = re.sub(rf"\b{symbol}\b", read, condition)  # noqa: PLW2901
                return re.sub(r"x\[(\d+)\]", lambda found: names[int(found[1])], condition)
        return ""


def shape_guard(opening: Opening, env: ShapeEnv) -> Guard:
    """The guard for a segment that began with *opening*; its conditions come from *env*.

    Each size is a number that must come back, a new symbol, or a symbol seen before; each symbol has a
    range; and every decision that Python or a kernel took from sizes is a condition.
    """
    reads, conditions = opening.reads()
    new = [symbol for _, symbol in reads]
    symbols = (*opening.known, *new)
    for symbol, bounds in env.var_to_range.items():
        if symbol in new and bounds.lower.is_finite and bounds.lower > 0:
            conditions.append(f"{symbol} >= {bounds.lower}")
    for guard in env.guards[opening.decided :]:
        expr = guard.expr
        if expr.free_symbols and expr.free_symbols <= set(symbols):
            if any(map(is_float, expr.free_symbols)) and not _is_comparison(expr):
                raise CaptureError(f"a decision on a float that would not be Python's: {expr}")
            conditions.append(_Printer().doprint(expr))
    conditions = list(dict.fromkeys(conditions))
    lines, outcomes = _decisions(opening, env)
    return Guard(
        (*conditions, *outcomes),
        _compiled("holds(x)", [], reads, conditions, "False", "True"),
        _compiled(
            "bind(known, x)", list(opening.known), reads, conditions, "None", tuple_text(symbols), lines
        ),
        tuple((str(symbol), read) for read, symbol in reads),
    )


class _Printer(PythonPrinter):
    """Prints numbers so that they come back to the bit."""

    def _print_Float(self, expr: sympy.Float) -> str:  # noqa: N802
        return repr(float(expr))


def _is_comparison(expr: sympy.Basic) -> bool:
    """Whether *expr* compares a symbol with a number or a symbol, which SymPy does as Python does."""
    sides = expr.args if isinstance(expr, sympy.core.relational.Relational) else ()
    return len(sides) == 2 and all(side.is_Symbol or side.is_number for side in sides)


def _decisions(opening: Opening, env: Any) -> tuple[list[str], list[str]]:
    """What was decided from floating point numbers: lines of Python that check it, and the conditions."""
    lines: list[str] = []
    conditions: list[str] = []
    defined: set[sympy.Basic] = set()
    definitions = getattr(env, "definitions", {})
    for function, operands, outcome in getattr(env, "outcomes", ())[opening.outcomes :]:
        symbols = set().union(*(o.free_symbols for o in operands if isinstance(o, sympy.Basic)))
        for symbol in needed(symbols, definitions):
            if symbol not in defined:
                defined.add(symbol)
                definition = definitions[symbol]
                lines.append(f"{symbol} = {called(definition.function, _texts(definition.operands))}")
        found = called(function, _texts(operands))
        # repr tells 0.0 from -0.0 and makes nan equal to itself
        condition = (
            f"repr({found}) == {repr(outcome)!r}" if isinstance(outcome, float) else f"{found} == {outcome!r}"
        )
        if condition not in conditions:
            conditions.append(condition)
            lines.append(f"if not ({condition}): return None")
    return lines, conditions


def _texts(operands: Sequence[Any]) -> list[str]:
    return [_Printer().doprint(o) if isinstance(o, sympy.Basic) else number_text(o) for o in operands]


def _compiled(
    head: str,
    known: list[sympy.Symbol],
    reads: list[tuple[str, sympy.Symbol]],
    conditions: list[str],
    no: str,
    yes: str,
    decisions: Sequence[str] = (),
) -> Any:
    lines = [f"    {tuple_text(known)} = known"] if known else []
    lines += [f"    {symbol} = {read}" for read, symbol in reads]
    lines += [f"    if not ({condition}): return {no}" for condition in conditions]
    if decisions:  # a number may be too large for what was done with another one
        lines += ["    try:", *(f"        {line}" for line in decisions)]
        lines += ["    except (ArithmeticError, ValueError):", f"        return {no}"]
    code = f"def {head}:\n" + "\n".join([*lines, f"    return {yes}"])
    scope: dict[str, Any] = {"math": math, "operator": operator}
    exec(compile(code, "<shape guard>", "exec"), scope)
    return scope[head.partition("(")[0]]
