"""Sizes that stay symbolic: from the inputs' sizes to nodes of the graph.

Inputs become fake tensors whose sizes are SymPy symbols.  When an operator gets a size that Python
computed, ``SizeNodes`` writes the arithmetic into the graph; what Python *decided* from sizes (``if``,
``range``, ``int``) is in the shape environment's guards, see ``guards.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from torch.utils._sympy.reference import PythonReferenceAnalysis

from fxamp.capture.numbers import Definition, is_float, known_float, needed
from fxamp.capture.plain_fakes import without_meta
from fxamp.ir.facts import size_of

__all__ = [
    "ObservedShapeEnv",
    "SizeNodes",
    "SymbolicNumber",
    "Sizes",
    "fake_input",
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
