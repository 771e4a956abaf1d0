"""The packed weights of a frozen module: which of its linear layers may read one, and what became of each.

A weight is packed once for all programs.  Calls of one operator by the same weight and bias share their
proofs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from fxamp.runtime.lower import FlatCode
from fxamp.runtime.packed_code import PackedCode, sizes_of_inputs, symbols_of
from fxamp.runtime.packed_linear import Form, PackedLinear, PackedWeight, form_of
from fxamp.runtime.prepack import Packing

__all__ = ["PackedWeights", "Prepacked"]


@dataclass(frozen=True)
class Prepacked:
    """What became of one weight in one kind of call, or in all.

    Attributes:
        weight: Its name.
        dtype: Its dtype.
        shape: Its shape.
        call: The sizes of the input; ``None`` for all calls.
        packed: Whether the packed weight is read.
        why: For people.
    """

    weight: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    call: tuple[int, ...] | None
    packed: bool
    why: str

    def __str__(self) -> str:
        sizes = "any input" if self.call is None else f"input {list(self.call)}"
        what = "packed" if self.packed else "plain"
        return f"{self.weight}: {self.dtype.abbr}{list(self.shape)}, {sizes}: {what}, {self.why}"


class PackedWeights:
    """The packed weights of one frozen module.

    Args:
        packing: How weights are packed.
    """

    def __init__(self, packing: Packing) -> None:
        self._packing = packing
        self._weights: dict[tuple[int, bool], PackedWeight] = {}
        self._linears: dict[Any, tuple[PackedLinear, torch.Tensor]] = {}
        self._codes: weakref.WeakSet[PackedCode] = weakref.WeakSet()
        self._plain: dict[str, Prepacked] = {}
        self._refusals: dict[torch.dtype, str] = {}

    def code(
        self,
        graph: Graph,
        tensors: Mapping[Node, torch.Tensor],
        keep_cast: Callable[..., torch.Tensor] | None,
        plain: FlatCode,
    ) -> PackedCode | None:
        """The flat code of *graph* that may read packed weights; ``None`` if there are none to read.

        Args:
            graph: The graph of a program.
            tensors: The rounded weights that its sources stand for.
            keep_cast: See :func:`~fxamp.runtime.lower.lower`.
            plain: Its flat code.
        """
        linears = self._linears_of(graph, tensors)
        if not linears:
            return None
        code = PackedCode(graph, keep_cast, plain, linears)
        self._codes.add(code)
        return code

    def _linears_of(self, graph: Graph, tensors: Mapping[Node, torch.Tensor]) -> dict[Node, PackedLinear]:
        found: dict[Node, PackedLinear] = {}
        where = sizes_of_inputs(graph)
        for node in graph.nodes:
            form = form_of(node)
            if form is None or form.weight not in tensors or (form.bias and form.bias not in tensors):
                continue
            weight = tensors[form.weight]
            why = self._refusal(weight)
            if not why and not symbols_of(node.args[form.operands.x]) <= where.keys():
                why = "the sizes of its input are computed in the call"
            if not why:
                found[node] = self._linear(form, weight, tensors)
                continue
            name = form.weight.meta["rounded"][0]
            self._plain[name] = Prepacked(
                name, weight.dtype, tuple(weight.shape), None, packed=False, why=why
            )
        return found

    def _refusal(self, weight: torch.Tensor) -> str:
        """Why *weight* is packed for no call at all; ``""`` if it may be."""
        if weight.device.type != "cpu":
            return f"it is on {weight.device.type}"
        if weight.numel() < self._packing.smallest:
            return f"it has fewer than {self._packing.smallest:,} elements"
        if weight.dtype not in self._refusals:
            self._refusals[weight.dtype] = self._packing.refusal(weight.dtype)
        return self._refusals[weight.dtype]

    def _linear(self, form: Form, weight: torch.Tensor, tensors: Mapping[Node, torch.Tensor]) -> PackedLinear:
        bias = None if form.bias is None else id(tensors[form.bias])
        name = form.weight.meta["rounded"][0]
        packed = self._weights.setdefault((id(weight), form.turned), PackedWeight(name, self._packing))
        key = (id(weight), form.turned, form.op, form.kinds, bias)
        if key not in self._linears:
            self._linears.setdefault(key, (PackedLinear(form, packed), weight))
        return self._linears[key][0]

    def told(self) -> tuple[Prepacked, ...]:
        """A line for each weight and kind of call."""
        rows = list(self._plain.values())
        for linear, weight in list(self._linears.values()):
            described = linear.weight.name, weight.dtype, tuple(weight.shape)
            verdicts = list(linear.told())
            rows += [Prepacked(*described, sizes, v.packed is not None, v.why) for sizes, v in verdicts]
            if not verdicts:
                rows.append(Prepacked(*described, None, packed=False, why="no call so far"))
        return tuple(rows)

    def forget(self) -> None:
        """Drop what was packed: the weights are others now."""
        for linear, _ in list(self._linears.values()):
            linear.forget()
        for code in list(self._codes):
            code.forget()

    def bytes(self) -> int:
        """What the packed copies take, beside the plain ones."""
        packed = [p for weight in list(self._weights.values()) for p in list(weight.layouts.values())]
        return sum(each.numel() * each.element_size() for each in packed)
