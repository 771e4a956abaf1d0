"""What a graph costs to run: casts, kernels, bytes and floating point operations, in symbolic sizes.

Each operator is one step.  It reads each tensor that it is given once and writes its results once; a view
does neither, and starts no kernel; a gather reads as much as it gives.  Matrix products, convolutions,
attention and the steps of a loop over time have floating point operations besides.  What an operator does
inside (workspaces, several kernels) is not seen, so these are the figures of a good implementation; nor is
the backward pass.

The comparison is a float32 run of the same graph: no cast of autocast, and float32 where it made values low.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import sympy
import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from fxamp.ir.blocks import Checkpointed, is_source
from fxamp.ir.device import Device
from fxamp.ir.facts import Fact, fact_of_node
from fxamp.ir.operators import is_inplace, is_to_dtype, operator_name
from fxamp.ir.regions import run_in_region

__all__ = ["Cost", "Step", "cost_of", "note_sizes"]

_READS_WHAT_IT_GIVES = frozenset({"embedding", "index_select", "gather", "index", "take_along_dim"})
_ONLY_WRITES = frozenset({"zero_", "fill_", "copy_"})  # to their first argument
_MAY_COPY = frozenset({"reshape", "contiguous", "flatten", "reshape_as", "to", "type_as"})


@dataclass(frozen=True)
class Step:
    """One kernel.

    Attributes:
        name: The operator.
        dtype: The dtype that it computes in.
        weights: Bytes of parameters and buffers, or of casts of them, that it reads.
        activations: Bytes that it reads and writes besides.
        flops: Floating point operations of matrix products.
        cast: Whether it is a cast; then all its bytes are those of casts.
        of_weight: Whether it is a cast of a parameter or buffer.
    """

    name: str
    dtype: torch.dtype
    weights: sympy.Expr
    activations: sympy.Expr
    flops: sympy.Expr
    cast: bool = False
    of_weight: bool = False


@dataclass(frozen=True)
class Cost:
    """What a call costs; sums of its steps, as SymPy expressions.

    Sizes that vary are symbols named after the inputs: ``x_0`` is the size of dimension 0 of ``x``.

    Attributes:
        steps: One for each kernel.
    """

    steps: tuple[Step, ...]

    @property
    def casts(self) -> int:
        """How many casts there are, those of weights included."""
        return sum(step.cast for step in self.steps)

    @property
    def weight_casts(self) -> int:
        """How many casts of weights there are."""
        return sum(step.of_weight for step in self.steps)

    @property
    def kernels(self) -> int:
        """How many kernels are started."""
        return len(self.steps)

    @property
    def weight_bytes(self) -> sympy.Expr:
        """Bytes of weights read by operators that are no casts."""
        return sympy.expand(sum(step.weights for step in self.steps if not step.cast))

    @property
    def activation_bytes(self) -> sympy.Expr:
        """Bytes of all else read and written by operators that are no casts."""
        return sympy.expand(sum(step.activations for step in self.steps if not step.cast))

    @property
    def cast_bytes(self) -> sympy.Expr:
        """Bytes read and written by casts."""
        return sympy.expand(sum(step.weights + step.activations for step in self.steps if step.cast))

    @property
    def flops(self) -> sympy.Expr:
        """Floating point operations of matrix products, convolutions and attention."""
        return sympy.expand(sum(step.flops for step in self.steps))

    @property
    def symbols(self) -> tuple[str, ...]:
        """The names of the sizes that it depends on."""
        free = {
            s for step in self.steps for e in (step.weights, step.activations, step.flops) for s in _free(e)
        }
        return tuple(sorted(symbol.name for symbol in free))

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.steps + other.steps)

    def at(self, **sizes: int) -> Cost:
        """The cost for these sizes, by the names in :attr:`symbols`."""
        return Cost(tuple(_step_at(step, sizes) for step in self.steps))

    def seconds(self, device: Device, **sizes: int) -> float:
        """The time on *device* by its roofline, for these sizes.

        Raises:
            TypeError: A size is missing.
        """
        steps = self.at(**sizes).steps
        numbers = [(float(s.weights + s.activations), float(s.flops), s.dtype) for s in steps]
        return sum(device.seconds(*each) for each in numbers)

    def __str__(self) -> str:
        return (
            f"{self.kernels} kernels, {self.casts} of them casts ({self.weight_casts} of weights)\n"
            f"bytes of weights:     {self.weight_bytes}\n"
            f"bytes of activations: {self.activation_bytes}\n"
            f"bytes of casts:       {self.cast_bytes}\n"
            f"flops:                {self.flops}"
        )


def _free(expression: Any) -> set[Any]:
    return getattr(expression, "free_symbols", set())


def _step_at(step: Step, sizes: Mapping[str, int]) -> Step:
    def at(expression: Any) -> Any:
        known = {symbol: sizes[symbol.name] for symbol in _free(expression) if symbol.name in sizes}
        return expression.subs(known) if known else expression

    return Step(
        step.name,
        step.dtype,
        at(step.weights),
        at(step.activations),
        at(step.flops),
        step.cast,
        step.of_weight,
    )


def note_sizes(graph: Graph) -> None:
    """Keep what :func:`cost_of` asks of the recorded fakes: which operators that may copy are views."""
    for node in graph.nodes:
        if _short(node) in _MAY_COPY and "moves_nothing" not in node.meta:
            values = (node.meta.get("val"), *(given.meta.get("val") for given in node.all_input_nodes[:1]))
            if len(values) == 2 and all(isinstance(value, torch.Tensor) for value in values):
                one, other = (value.untyped_storage()._cdata for value in values)
                node.meta["moves_nothing"] = one == other


def cost_of(
    module: GraphModule, *, low: torch.dtype | None = None, known: Mapping[Any, Any] | None = None
) -> Cost:
    """The cost of one run of *module*'s graph.

    Args:
        module: A rewritten graph.
        low: With a dtype, that of a float32 run instead: without the casts that autocast makes, and with
            float32 for *low*.
        known: Sizes that turned out to be others, or numbers.
    """
    names = dict(known or {})
    for node in module.graph.find_nodes(op="placeholder"):
        fact = node.meta.get("fact")
        for index, size in enumerate(fact.shape if isinstance(fact, Fact) else ()):
            if isinstance(size, sympy.Symbol) and size not in names:
                names[size] = sympy.Symbol(f"{node.name}_{index}", integer=True, positive=True)
    counter = _Counter(module, low, names)
    return Cost(tuple(step for node in module.graph.nodes for step in counter.steps(node)))


@dataclass(frozen=True)
class _Counter:
    module: GraphModule
    low: torch.dtype | None
    names: Mapping[Any, Any]
    inputs: frozenset[Node] = frozenset()
    """Inputs of a block that are weights outside of it."""

    def steps(self, node: Node) -> Iterator[Step]:
        """The kernels of *node*: one or none."""
        if isinstance(node.target, Checkpointed):
            yield from self._inside(node, node.target)
            return
        if node.op != "call_function" or node.meta.get("fact") is None or _is_view(node):
            return
        if self.low is not None and "inserted" in node.meta:
            return
        results = list(_facts(node.meta["fact"]))
        written = sum(map(self._bytes, results))
        read = {
            given: sum(map(self._bytes, _facts(given.meta.get("fact")))) for given in node.all_input_nodes
        }
        if _short(node) in _READS_WHAT_IT_GIVES and node.args and isinstance(node.args[0], Node):
            read[node.args[0]] = written
        if _short(node) in _ONLY_WRITES and isinstance(node.args[0], Node):
            read.pop(node.args[0])
        weights = {given: size for given, size in read.items() if self._is_weight(given)}
        yield Step(
            name=_short(node),
            dtype=self._dtype(_computed_in(node, results)) if results else torch.float32,
            weights=sympy.sympify(sum(weights.values())),
            activations=sympy.sympify(sum(s for given, s in read.items() if given not in weights) + written),
            flops=sympy.sympify(self._flops(node, results)),
            cast=_is_cast(node),
            of_weight=_is_cast(node) and bool(weights),
        )

    def _inside(self, node: Node, target: Checkpointed) -> Iterator[Step]:
        """The kernels of a block in the forward pass."""
        block, _, operands, closure = node.args
        inner = getattr(self.module, str(block.target))  # type: ignore[union-attr]
        given = [(*operands, *closure)[place] for place in target.first]  # type: ignore[misc]
        inputs = zip(inner.graph.find_nodes(op="placeholder"), given, strict=True)
        weights = [own for own, outer in inputs if isinstance(outer, Node) and self._is_weight(outer)]
        counter = _Counter(inner, self.low, self.names, frozenset(weights))
        for each in inner.graph.nodes:
            yield from counter.steps(each)

    def _is_weight(self, node: Node) -> bool:
        """Whether *node* is a parameter or buffer, a cast of one, or a view of either."""
        while node.op == "call_function" and (_is_cast(node) or _is_view(node)):
            if not node.all_input_nodes:
                return False
            node = node.all_input_nodes[0]
        return is_source(node) or node in self.inputs

    def _dtype(self, fact: Fact) -> torch.dtype:
        return torch.float32 if fact.dtype is self.low else fact.dtype

    def _count(self, fact: Fact) -> Any:
        return prod((self._size(size) for size in fact.shape), start=sympy.Integer(1))

    def _size(self, size: Any) -> Any:
        return size.subs(self.names) if isinstance(size, sympy.Expr) else size

    def _bytes(self, fact: Fact) -> Any:
        return self._count(fact) * self._dtype(fact).itemsize

    def _flops(self, node: Node, results: list[Fact]) -> Any:
        if "whole" in node.meta:
            rows, weights = _loop(node)
            products = sum(map(self._count, weights))
            return 2 * products * prod(map(self._size, rows), start=sympy.Integer(1))
        inner = _INNER.get(_short(node).removesuffix("_"))
        facts = [given.meta.get("fact") for given in _tensors(node)]
        if inner is None or not results or not all(isinstance(fact, Fact) for fact in facts):
            return 0
        return 2 * self._count(results[0]) * prod(map(self._size, inner(facts)), start=sympy.Integer(1))


def _tensors(node: Node) -> list[Node]:
    args = node.args[2:] if node.target is run_in_region else node.args
    return [arg for arg in args if isinstance(arg, Node) and arg.meta.get("fact") is not None]


def _loop(node: Node) -> tuple[tuple[Any, ...], list[Fact]]:
    """The sizes of the steps of a loop over time (how many, of how many rows), and its matrices."""
    args = node.args[2:] if node.target is run_in_region else node.args
    fact = fact_of_node(args[0])
    assert fact is not None
    lists = [arg for arg in args if isinstance(arg, (list, tuple))]
    weights = [found for each in lists[-1] if (found := fact_of_node(each)) is not None]
    return fact.shape[:-1], [weight for weight in weights if len(weight.shape) == _MATRIX]


def _computed_in(node: Node, results: list[Fact]) -> Fact:
    return _loop(node)[1][0] if "whole" in node.meta else results[0]


_MATRIX = 2


def _attention(facts: list[Fact]) -> tuple[Any, ...]:
    return 2, facts[1].shape[-2]  # the scores, and their product with the values


# Over how many products an element of the result is the sum, by operator, from the facts of its tensors.
_INNER = {
    "linear": lambda facts: facts[0].shape[-1:],
    "matmul": lambda facts: facts[0].shape[-1:],
    "mm": lambda facts: facts[0].shape[-1:],
    "bmm": lambda facts: facts[0].shape[-1:],
    "mv": lambda facts: facts[0].shape[-1:],
    "dot": lambda facts: facts[0].shape[-1:],
    "addmm": lambda facts: facts[1].shape[-1:],
    "addbmm": lambda facts: facts[1].shape[-1:],
    "baddbmm": lambda facts: facts[1].shape[-1:],
    "conv1d": lambda facts: facts[1].shape[1:],
    "conv2d": lambda facts: facts[1].shape[1:],
    "conv3d": lambda facts: facts[1].shape[1:],
    "scaled_dot_product_attention": _attention,
}


def _is_cast(node: Node) -> bool:
    source, fact = fact_of_node(node.args[0]) if node.args else None, fact_of_node(node)
    return is_to_dtype(node) and source is not None and fact is not None and source.dtype is not fact.dtype


def _is_view(node: Node) -> bool:
    if _is_cast(node):
        return False
    if "moves_nothing" in node.meta:
        return bool(node.meta["moves_nothing"])
    if node.target is operator.getitem:
        return True
    target = node.target
    if not isinstance(target, OpOverload) or is_inplace(target):
        return False
    returned = target._schema.returns
    return bool(returned) and all(each.alias_info is not None for each in returned)


def _short(node: Node) -> str:
    target = node.args[1] if node.target is run_in_region else node.target
    return operator_name(target).removeprefix("aten::").split(".")[0]


def _facts(facts: Any) -> Iterator[Fact]:
    if isinstance(facts, Fact):
        yield facts
    elif isinstance(facts, tuple):
        for fact in facts:
            yield from _facts(fact)
