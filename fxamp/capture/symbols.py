"""Sizes that stay symbolic: from the inputs' sizes to nodes of the graph, and the guards on them.

Inputs become fake tensors whose sizes are SymPy symbols.  When an operator gets a size that Python
computed, ``SizeNodes`` writes the arithmetic into the graph; what Python *decided* from sizes (``if``,
``range``, ``int``) is in the shape environment's guards, and ``shape_guard`` turns those into one
function of the real sizes.  A call that fails it is captured again.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, cast

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, Node, Proxy
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.reference import PythonReferenceAnalysis

from fxamp.capture.numbers import Definition, called, is_float, known_float, needed, number_text
from fxamp.capture.plain_fakes import without_meta
from fxamp.errors import CaptureError
from fxamp.ir.facts import size_of

__all__ = [
    "Guard",
    "ObservedShapeEnv",
    "Opening",
    "SizeNodes",
    "Sizes",
    "fake_input",
    "shape_guard",
    "symbolic_number",
]

SymbolicNumber = torch.SymInt | torch.SymFloat | torch.SymBool


class ObservedShapeEnv(ShapeEnv):
    """A shape environment that tells when Python asks for a value that is not known, even if it goes on.

    Attributes:
        refuse: Called with the error.
        reads: Whether symbols were made for values that are not known.
        definitions: How floating point numbers were computed from others, in order.
        outcomes: What was decided from such numbers: ``function(*operands)`` was *outcome*.
        numbers: How many numbers were read or computed.
    """

    refuse: Callable[[Exception], None] | None = None
    reads: bool = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.definitions: dict[sympy.Basic, Definition] = {}
        self.outcomes: list[tuple[Callable[..., Any], tuple[Any, ...], Any]] = []
        self.numbers = 0

    def create_unbacked_symint(self, *args: Any, **kwargs: Any) -> Any:
        """Note that a value is not known."""
        self.reads = True
        return super().create_unbacked_symint(*args, **kwargs)

    def create_unbacked_symfloat(self, *args: Any, **kwargs: Any) -> Any:
        """Note that a value is not known."""
        self.reads = True
        return super().create_unbacked_symfloat(*args, **kwargs)

    def create_unbacked_symbool(self, *args: Any, **kwargs: Any) -> Any:
        """Note that a value is not known."""
        self.reads = True
        return super().create_unbacked_symbool(*args, **kwargs)

    def _make_data_dependent_error(self, *args: Any, **kwargs: Any) -> Any:
        error = super()._make_data_dependent_error(*args, **kwargs)
        if self.refuse is not None:
            self.refuse(error)
        return error


class Sizes(Enum):
    """Which sizes of the inputs are symbols; 0 and 1 never are."""

    FIXED = "none: a program serves the sizes of its example"
    LEADING = "all of a tensor with up to three dimensions, the batch of an image or a volume"
    ALL = "all: spatial sizes too, which makes capture several times slower"

    def symbolic(self, dimensions: int) -> list[bool]:
        """For each of so many *dimensions*, whether its size is a symbol."""
        if self is Sizes.LEADING and dimensions > _SEQUENCE:
            return [True] + [False] * (dimensions - 1)
        return [self is not Sizes.FIXED] * dimensions


_SEQUENCE = 3  # batch, position, feature


def fake_input(mode: FakeTensorMode, tensor: torch.Tensor, symbolic: Sequence[bool]) -> FakeTensor:
    """A fake of *tensor* with symbols for some of its sizes; its place in the gradient is kept.

    Args:
        mode: Where the fake lives.
        tensor: An input of the call, any shape.
        symbolic: For each dimension, whether its size is a symbol.
    """
    plain = without_meta(tensor.detach())
    if any(symbolic) and plain.layout == torch.strided:
        context: Any = StatelessSymbolicContext(
            dynamic_sizes=[DimDynamic.DYNAMIC if size else DimDynamic.STATIC for size in symbolic],
            constraint_sizes=[None] * plain.dim(),
        )
        fake = mode.from_tensor(plain, static_shapes=False, symbolic_context=context)
    else:
        fake = mode.from_tensor(plain, static_shapes=True)
    if not tensor.requires_grad:
        return fake
    fake.requires_grad_()
    if tensor.is_leaf and not tensor._is_view():
        return fake
    with mode, torch.enable_grad():  # a clone is no leaf, as the input is none
        clone: Any = fake.clone()
        return cast("FakeTensor", clone)


class _SizeTracer(GraphAppendingTracer):
    """Writes arithmetic on sizes; such nodes hold no tensor."""

    def create_node(self, *args: Any, **kwargs: Any) -> Node:
        node = super().create_node(*args, **kwargs)
        node.meta["fact"] = None
        return node


@dataclass
class SizeNodes:
    """Nodes for the symbolic numbers of one graph, each expression written once.

    Attributes:
        graph: Where the nodes go.
        lift: Gives a node for a symbol that was read before the graph began.
        symbols: The node that holds the value of each symbol.
    """

    graph: Graph
    lift: Callable[[sympy.Symbol], Node | None] = lambda symbol: None
    symbols: dict[sympy.Symbol, Node] = field(default_factory=dict)
    _written: dict[sympy.Basic, Node] = field(default_factory=dict)

    def add_sizes_of(self, node: Node, fake: torch.Tensor) -> None:
        """Note each symbol that is a size or stride of *fake*, which *node* stands for."""
        if fake.layout != torch.strided:
            return
        queries = ((torch.ops.aten.sym_size.int, fake.shape), (torch.ops.aten.sym_stride.int, fake.stride()))
        for query, sizes in queries:
            for dim, size in enumerate(sizes):
                symbol = size_of(size)
                if isinstance(symbol, sympy.Symbol) and symbol not in self.symbols:
                    self.symbols[symbol] = self._query(query, node, dim)
                    self.symbols[symbol].meta["symbol"] = symbol
                    self.symbols[symbol].meta["number"] = size

    def _query(self, query: Callable[..., object], node: Node, dim: int) -> Node:
        sized = self.graph.call_function(query, (node, dim))
        sized.meta["fact"] = None
        return sized

    def bind(self, number: SymbolicNumber, node: Node) -> None:
        """Note that *node* computes *number*, a symbol of its own (``x.item()``)."""
        expr = number.node.expr
        if isinstance(expr, sympy.Symbol):
            self.symbols.setdefault(expr, node)

    def node_of(self, symbol: sympy.Symbol) -> Node | None:
        """The node of *symbol*, if anything has it."""
        if symbol not in self.symbols:
            node = self.lift(symbol)
            if node is None:
                return None
            self.symbols[symbol] = node
            node.meta["symbol"] = symbol
        return self.symbols[symbol]

    def node_for(self, number: SymbolicNumber) -> object:
        """The node, or the plain number, that *number* is; writes the arithmetic if it is new."""
        expr = number.node.expr
        if expr.is_number or expr in (sympy.true, sympy.false):
            return number.node.pytype(expr)
        if (
            isinstance(number, torch.SymFloat)
            and not expr.is_Symbol
            and any(map(is_float, expr.free_symbols))
        ):
            raise TypeError(f"arithmetic on a float that would not be Python's: {expr}")
        env = number.node.shape_env
        definitions = getattr(env, "definitions", {})
        for symbol in needed(expr.free_symbols - self.symbols.keys(), definitions):
            self._define(symbol, definitions[symbol], env)
        if expr not in self._written:
            self._written[expr] = self._write(expr, env)
            self._written[expr].meta["number"] = number
        return self._written[expr]

    def _define(self, symbol: sympy.Symbol, definition: Definition, env: Any) -> None:
        """Compute *symbol* as Python did."""
        if symbol in self.symbols:
            return
        operands = [self._write(o, env) if isinstance(o, sympy.Basic) else o for o in definition.operands]
        node = self.graph.call_function(definition.function, tuple(operands))
        node.meta.update(fact=None, symbol=symbol, number=definition.number)
        self.symbols[symbol] = node

    def _write(self, expr: sympy.Basic, env: Any) -> Node:
        tracer = _SizeTracer(self.graph)
        for symbol in sorted(expr.free_symbols, key=str):
            self.node_of(symbol)
        known = {symbol: Proxy(node, tracer) for symbol, node in self.symbols.items()}
        missing = expr.free_symbols - known.keys()
        if missing:
            raise LookupError(f"no tensor has the size {sorted(map(str, missing))}")
        if expr in self.symbols:
            return self.symbols[expr]
        proxy: Proxy = sympy_interp(PythonReferenceAnalysis, known, expr)
        return proxy.node


@dataclass(frozen=True)
class Opening:
    """The values that a segment of a program begins with, and the sizes that are read from them.

    Attributes:
        fakes: The inputs of the call, or what the operator at the end of the segment before gave: fake
            tensors and symbolic numbers.
        known: The symbols that earlier segments have read, in order.
        decided: How many guards the shape environment had before.
        outcomes: Likewise, how many outcomes of decisions on floating point numbers.
    """

    fakes: tuple[object, ...]
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
        for fake in self.fakes:
            candidates: list[Any] = [fake]
            if isinstance(fake, torch.Tensor):
                candidates = [*fake.shape, *(fake.stride() if fake.layout == torch.strided else ())]
            for number in candidates:
                if isinstance(number, SymbolicNumber) and isinstance(number.node._expr, sympy.Symbol):
                    found.setdefault(number.node._expr, number)
        return found

    def _numbers(self) -> Iterator[tuple[str, object, bool]]:
        for index, fake in enumerate(self.fakes):
            if isinstance(fake, SymbolicNumber):
                yield from _first_and_now(f"x[{index}]", fake)
            if not isinstance(fake, torch.Tensor):
                continue
            yield from _sizes("size", index, fake.shape)
            if fake.layout == torch.strided:
                yield from _sizes("stride", index, fake.stride())


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
        _compiled("bind(known, x)", list(opening.known), reads, conditions, "None", _names(symbols), lines),
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
    lines = [f"    {_names(known)} = known"] if known else []
    lines += [f"    {symbol} = {read}" for read, symbol in reads]
    lines += [f"    if not ({condition}): return {no}" for condition in conditions]
    if decisions:  # a number may be too large for what was done with another one
        lines += ["    try:", *(f"        {line}" for line in decisions)]
        lines += ["    except (ArithmeticError, ValueError):", f"        return {no}"]
    code = f"def {head}:\n" + "\n".join([*lines, f"    return {yes}"])
    scope: dict[str, Any] = {"math": math, "operator": operator}
    exec(compile(code, "<shape guard>", "exec"), scope)
    return scope[head.partition("(")[0]]


def _names(symbols: Sequence[sympy.Symbol]) -> str:
    return f"({', '.join(map(str, symbols))}{',' if len(symbols) == 1 else ''})"


def symbolic_number(env: ShapeEnv, value: bool | int | float, name: str) -> Any:  # noqa: FBT001, PYI041
    """A symbol for a number that was read from a tensor, with *value* as its example.

    What is decided from it becomes a guard of *env*.  A truth value is given back as it is, with a guard
    that it must come back.
    """
    from torch._dynamo.source import ConstantSource  # noqa: PLC0415  takes long to import

    if isinstance(value, float):
        return known_float(env, value)
    source = ConstantSource(name)
    symbol = env.create_symbol(
        int(value),
        source=source,
        dynamic_dim=DimDynamic.DYNAMIC,
        constraint_dim=None,
        positive=None,
        do_not_specialize_zero_one=True,
    )
    return env.create_symintnode(symbol, hint=int(value), source=source)
