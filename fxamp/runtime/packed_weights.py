"""The packed weights of a frozen module: which of its linear layers may read one, and what became of each.

A weight is packed once for all programs.  Calls of one operator by the same weight and bias share their
proofs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

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
        self._plain: dict[str, Prepacked] = {}
        self._refusals: dict[torch.dtype, str] = {}

    def calls(self, graph: Graph, tensors: Mapping[Node, torch.Tensor]) -> dict[Node, PackedLinear]:
        """What is called for the linear layers of *graph*.

        Args:
            graph: The graph of a program.
            tensors: The rounded weights that its sources stand for.
        """
        found: dict[Node, PackedLinear] = {}
        for node in graph.nodes:
            form = form_of(node)
            if form is None or form.weight not in tensors or (form.bias and form.bias not in tensors):
                continue
            weight = tensors[form.weight]
            why = self._refusal(weight)
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
            described = linear.name, weight.dtype, tuple(weight.shape)
            verdicts = list(linear.told())
            rows += [Prepacked(*described, sizes, v.packed is not None, v.why) for sizes, v in verdicts]
            if not verdicts:
                rows.append(Prepacked(*described, None, packed=False, why="no call so far"))
        return tuple(rows)

    def forget(self) -> None:
        """Drop what was packed: the weights are others now."""
        for linear, _ in list(self._linears.values()):
            linear.forget()

    def bytes(self) -> int:
        """What the packed copies take, beside the plain ones."""
        packed = [p for weight in list(self._weights.values()) for p in list(weight.layouts.values())]
        return sum(each.numel() * each.element_size() for each in packed)
