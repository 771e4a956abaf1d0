"""The flat code of a program that may read packed weights: a function for each kind of call.

Which linear layers read packed weights is decided once for calls of one kind: the number of threads and the
sizes of the call that the inputs of linear layers depend on (not the length of a cache of keys, say).

* The first calls of a kind run *on trial*: each linear layer asks for the verdict on such calls.
* Once all verdicts are known, the code calls the operators, or multiplies by the packed weights, directly.

Under a dispatch mode or a function transform, which would see packed weights, and for tensors of other
classes the code is the plain one.  The functions differ only in what the names of the linear layers stand
for, so they share one code object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from fxamp.ir.facts import fact_of_node
from fxamp.runtime.lower import FlatCode, lower
from fxamp.runtime.packed_linear import MISALIGNED, PackedLinear, Proven
from fxamp.runtime.prepack import Verdict

__all__ = ["PackedCode", "sizes_of_inputs", "symbols_of"]

_MOST_KINDS = 16  # of calls of a program; others are plain
_MOST_MISALIGNED = 3

SizePlace = tuple[int, int]
"""An input, and one of its dimensions."""


def sizes_of_inputs(graph: Graph) -> dict[sympy.Symbol, SizePlace]:
    """Where the symbols in the sizes of *graph* are read from its inputs."""
    found: dict[sympy.Symbol, SizePlace] = {}
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for index, node in enumerate(inputs):
        fact = fact_of_node(node)
        for dimension, size in enumerate(() if fact is None else fact.shape):
            if isinstance(size, sympy.Symbol):
                found.setdefault(size, (index, dimension))
    return found


def symbols_of(value: object) -> set[sympy.Symbol]:
    """The symbols in the sizes of *value*, a node that stands for a tensor."""
    fact = fact_of_node(value)
    assert fact is not None
    return {symbol for size in fact.shape if not isinstance(size, int) for symbol in size.free_symbols}


class PackedCode:
    """The flat code of one program, by kind of call.

    Args:
        graph: The program's.
        keep_cast: See :func:`~fxamp.runtime.lower.lower`.
        plain: The flat code that reads plain weights.
        linears: The nodes that may read packed ones; the sizes of their inputs follow from the program's.
    """

    def __init__(
        self,
        graph: Graph,
        keep_cast: Callable[..., torch.Tensor] | None,
        plain: FlatCode,
        linears: Mapping[Node, PackedLinear],
    ) -> None:
        self._plain = plain
        places = {node: _Place(linear) for node, linear in linears.items()}
        self._code = lower(graph, keep_cast, places, consumes=plain.consumes)
        scope = self._code.run.__globals__
        self._linears = {name: value.linear for name, value in scope.items() if isinstance(value, _Place)}
        where = sizes_of_inputs(graph)
        inputs = [node.args[linear.form.operands.x] for node, linear in linears.items()]
        self._sizes = sorted({where[symbol] for each in inputs for symbol in symbols_of(each)})
        self._chosen: dict[Any, FlatCode | _Trial] = {}

    def choose(self, leaves: Sequence[Any]) -> FlatCode:
        """What serves the call with these inputs."""
        if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
            return self._plain
        for leaf in leaves:
            if type(leaf) is not torch.Tensor and isinstance(leaf, torch.Tensor):
                return self._plain
        kind = (
            torch.get_num_threads(),
            torch._C._get_mkldnn_enabled(),
            *[leaves[index].shape[dimension] for index, dimension in self._sizes],
        )
        chosen = self._chosen.get(kind)
        if isinstance(chosen, FlatCode):
            return chosen
        if chosen is None:
            if len(self._chosen) >= _MOST_KINDS:
                return self._plain
            self._chosen[kind] = chosen = _Trial(self._linears)
        if not chosen.is_over():
            return self._with(chosen.places)
        self._chosen[kind] = settled = self._settled(chosen)
        return settled

    def _settled(self, trial: _Trial) -> FlatCode:
        calls = {name: place.settled(self.forget) for name, place in trial.places.items()}
        return self._with(calls) if any(isinstance(call, Proven) for call in calls.values()) else self._plain

    def _with(self, calls: Mapping[str, Callable[..., Any]]) -> FlatCode:
        run = self._code.run
        assert isinstance(run, FunctionType)
        run = FunctionType(run.__code__, {**run.__globals__, **calls}, "run")
        return FlatCode(self._code.text, run, self._code.consumes)

    def forget(self) -> None:
        """Put all calls on trial again: a weight was written to."""
        self._chosen = {}


class _Trial:
    """The linear layers of a program in the first calls of a kind."""

    def __init__(self, linears: Mapping[str, PackedLinear]) -> None:
        self.places = {name: _Place(linear) for name, linear in linears.items()}

    def is_over(self) -> bool:
        return all(place.verdict is not None for place in self.places.values())


class _Place:
    """A node of a graph: a linear layer, and the verdict on its calls of one kind."""

    __name__ = "linear_on_trial"

    def __init__(self, linear: PackedLinear) -> None:
        self.linear = linear
        self.verdict: Verdict | None = None
        self._misaligned = 0

    def __call__(self, *args: Any) -> Any:
        if self.verdict is None:
            verdict = self.linear.verdict(args)
            self._misaligned += verdict is MISALIGNED
            if verdict is not MISALIGNED or self._misaligned == _MOST_MISALIGNED:
                self.verdict = verdict
        return self.linear.plain(*args)

    def settled(self, stale: Callable[[], None]) -> Callable[..., Any]:
        """What is called from now on."""
        assert self.verdict is not None
        if self.verdict.packed is None:
            return self.linear.plain
        return Proven(self.linear, self.verdict, stale)
