"""The fits check: weights and constants that low precision does not have, found before anything is exported.

    findings = unfit(amp.graph_module)                        a converted model's graph: it has its weights
    findings = unfit(frozen.graph_module, float32_weights)    a frozen one's, whose copies are rounded already

Looked at is what a constant meets in the graph, not what it might meet: a mask of -1e9 that only float32
operators see fits.  Three things can happen to one:

==================  ==================================================================================
overflows to inf    it is finite and beyond the largest number; torch computes with Inf, or raises
flushed to zero     it is not 0 and becomes 0
rounds away         it has no effect: an eps that is added as 0, a bound of 1 - 1e-7 that becomes 1
==================  ==================================================================================

Weights, buffers and other tensors are compared element by element (``lost_elements.py``), numbers by what the
operator does with them (``roles.py``), through float32 up to the cast that they are lost in (``reach.py``).
-Inf, which masks are made of, fits every dtype, and so does NaN.

A finding has the override under which it is gone: it keeps the operators that the constant meets in float32.
``clamped`` (``clamp.py``) changes the constants instead.

Not seen are numbers that Python has converted before the graph sees them (``y[mask] = -1e9``, where torch
itself makes a low precision -Inf of the number), that are computed from inputs, or that depend on sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

import torch
from torch.fx import GraphModule, Node

from fxamp.export.lost_elements import Lost, lost_elements
from fxamp.export.reach import Landing, is_low, is_wide, keepers, landings
from fxamp.export.roles import Role, numbers_of
from fxamp.ir.blocks import is_source
from fxamp.ir.facts import fact_of_node
from fxamp.ir.operators import operator_name
from fxamp.ir.scalars import is_flushed, overflows
from fxamp.ir.where import Where

__all__ = ["Kind", "Spot", "Unfit", "attribute", "before_rounding", "find", "tell", "unfit"]


class Kind(Enum):
    """What happens to a constant that does not fit."""

    OVERFLOWS = "overflows to inf"
    FLUSHED = "flushed to zero"
    ROUNDS_AWAY = "rounds away"


@dataclass(frozen=True)
class Unfit:
    """A weight or constant that low precision does not have.

    Attributes:
        name: The tensor's name in the model, or the argument and the operator that it is given to.
        where: Module path and source line of the operator that is given the number, or that meets the tensor.
        value: The number, of a tensor the largest of the elements that are lost, by size.
        dtype: The low precision dtype.
        kind: What happens.
        count: How many elements of a tensor are lost; 1 for a number.
        total: How many it has.
        suggestion: An expression that makes a policy of ``policy`` under which it is gone; ``""`` where the
            model itself asks for the low precision, so that no policy can help.
    """

    name: str
    where: Where
    value: float
    dtype: torch.dtype
    kind: Kind
    count: int
    total: int
    suggestion: str

    def __str__(self) -> str:
        return f"{self._loss}; {self._help} ({self.where})"

    def tell(self) -> str:
        """The same on two lines, the way out on its own."""
        return f"{self._loss}, at {self.where}\n  {self._help}"

    @property
    def _loss(self) -> str:
        what = f"{self.name} = {self.value:g}"
        if self.total > 1:
            what = f"{self.name} (of {self.total} elements {self.count}, up to {self.value:g})"
        return f"{what} {self.kind.value} in {self.dtype.abbr}, {self._limit}"

    @property
    def _help(self) -> str:
        return self.suggestion or f"no override helps, the model itself asks for {self.dtype.abbr}"

    @property
    def _limit(self) -> str:
        """What the dtype lacks."""
        limits = torch.finfo(self.dtype)
        if self.kind is Kind.OVERFLOWS:
            return f"which ends at {limits.max:g}"
        if is_flushed(self.value, self.dtype):
            return f"which starts at {limits.smallest_normal * limits.eps:.1g}"
        return f"which has {1 - round(math.log2(limits.eps))} binary digits"


@dataclass(frozen=True)
class Spot:
    """Where in a graph a constant is.

    Attributes:
        node: A tensor that the graph reads, or the operator that is given a number.
        argument: The name of the argument; ``""`` for a tensor.
    """

    node: Node
    argument: str = ""


def unfit(module: GraphModule, weights: Mapping[str, torch.Tensor] | None = None) -> tuple[Unfit, ...]:
    """The weights and constants of a rewritten graph that do not fit the low precision they meet.

    Args:
        module: The graph of a converted or frozen module, with its tensors.
        weights: float32 tensors by their names in the model, which a frozen module does not have any more.
            Of a rounded weight that is not among them, Inf is taken for what overflowed, and nothing is known
            of what was flushed.
    """
    return tuple(dict.fromkeys(finding for finding, _, _ in find(module, weights or {})))


def tell(findings: Sequence[Unfit]) -> str:
    """The findings for people, the worst first; ``""`` if there are none."""
    if not findings:
        return ""
    order = list(Kind)
    ranked = sorted(findings, key=lambda finding: order.index(finding.kind))
    count = f"{len(ranked)} constant{'s do' if len(ranked) > 1 else ' does'} not fit"
    return "\n".join((f"{count} the low precision:", *(finding.tell() for finding in ranked)))


def find(
    module: GraphModule, weights: Mapping[str, torch.Tensor]
) -> Iterator[tuple[Unfit, GraphModule, Spot]]:
    """As :func:`unfit`, each with the graph and the place of the constant; what is lost twice comes twice."""
    for part in module.modules():
        if isinstance(part, GraphModule):
            for node in part.graph.nodes:
                found = _tensor(part, node, weights) if is_source(node) else _numbers(node)
                yield from ((finding, part, spot) for finding, spot in found)


# --- tensors ------------------------------------------------------------------------------------------


def _tensor(
    module: GraphModule, node: Node, weights: Mapping[str, torch.Tensor]
) -> Iterator[tuple[Unfit, Spot]]:
    name = str(node.target)
    if "rounded" in node.meta:
        name, dtype = node.meta["rounded"]
        ways = {dtype: [Landing(node, dtype)]}
    elif is_wide(node):
        ways = _by_dtype(landings(node))
    else:
        derived = _derived(node)
        ways = {} if derived is None else {node.meta["fact"].dtype: [Landing(node, node.meta["fact"].dtype)]}
    for dtype, reached in ways.items():
        tensor = before_rounding(module, node, weights)
        infinite, flushed = lost_elements(tensor, dtype)
        if infinite is not None:
            yield _finding(name, Kind.OVERFLOWS, infinite, reached, Role.FILL), Spot(node)
        kept = [landing for landing in reached if not landing.after_sum]
        if flushed is not None and kept:
            added = all(landing.role is Role.ADDEND for landing in kept)
            kind = Kind.ROUNDS_AWAY if added else Kind.FLUSHED
            yield _finding(name, kind, flushed, kept, Role.FILL), Spot(node)


def before_rounding(module: GraphModule, node: Node, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The values that *node*, a tensor that a graph of *module* reads, had before it was rounded, if known.

    Args:
        module: As for :func:`unfit`.
        node: A ``get_attr`` node of it.
        weights: As for :func:`unfit`.
    """
    target = str(node.target)
    name = node.meta["rounded"][0] if "rounded" in node.meta else target
    if "derived" not in node.meta and name in weights:
        return weights[name]
    derived = None if is_wide(node) else _derived(node)
    return attribute(module, target) if derived is None else derived


def _derived(node: Node) -> torch.Tensor | None:
    """What *node* was derived of weights as, before it was rounded."""
    found: torch.Tensor | None = node.meta["unrounded"]() if "unrounded" in node.meta else None
    return found


def _by_dtype(reached: list[Landing]) -> dict[torch.dtype, list[Landing]]:
    ways: dict[torch.dtype, list[Landing]] = {}
    for landing in reached:
        ways.setdefault(landing.dtype, []).append(landing)
    return ways


def attribute(module: GraphModule, target: str) -> torch.Tensor:
    """The tensor that a graph of *module* reads as *target*."""
    path, _, name = target.rpartition(".")
    tensor: torch.Tensor = getattr(module.get_submodule(path), name)
    return tensor


# --- numbers ------------------------------------------------------------------------------------------


def _numbers(node: Node) -> Iterator[tuple[Unfit, Spot]]:
    fact = fact_of_node(node)
    if node.op != "call_function" or fact is None or not fact.dtype.is_floating_point:
        return
    for argument, value, role in numbers_of(node):
        name = f"{argument} of {operator_name(node.target).partition('.')[0]}"
        ways = {fact.dtype: [Landing(node, fact.dtype, role)]}
        if not is_low(node):
            ways = _by_dtype(landings(node)) if role is not Role.BOUND else {}
        for dtype, reached in ways.items():
            kind = _kind(value, dtype, role)
            if kind is Kind.OVERFLOWS or is_low(node):
                lossy = reached
            else:  # it is lost where it is an element
                lossy = [landing for landing in reached if role is Role.FILL and not landing.after_sum]
            if kind is not None and lossy:
                finding = _finding(name, kind, Lost(1, 1, value), lossy, role)
                yield replace(finding, where=_where(node)), Spot(node, argument)


def _kind(value: float, dtype: torch.dtype, role: Role) -> Kind | None:
    if overflows(value, dtype):
        return Kind.OVERFLOWS
    if is_flushed(value, dtype):
        return Kind.ROUNDS_AWAY if role is Role.ADDEND else Kind.FLUSHED
    if (
        role is Role.BOUND
        and abs(value) != 1
        and abs(torch.tensor(value, device="cpu").to(dtype).item()) == 1
    ):
        return Kind.ROUNDS_AWAY
    return None


# --- what helps ---------------------------------------------------------------------------------------


def _finding(name: str, kind: Kind, lost: Lost, reached: Sequence[Landing], role: Role) -> Unfit:
    huge = kind is Kind.OVERFLOWS
    flows = role is Role.FILL or (huge and role is not Role.BOUND)
    kept = keepers([landing.node for landing in reached], huge=huge, flows=flows)
    texts = dict.fromkeys(_override(node) for node in kept)
    suggestion = "policy" + "".join(texts) if texts else ""
    where = _where(kept[0] if is_source(reached[0].node) and kept else reached[0].node)
    return Unfit(name, where, lost.extreme, reached[0].dtype, kind, lost.count, lost.total, suggestion)


def _where(node: Node) -> Where:
    return node.meta.get("where") or Where()


def _override(node: Node) -> str:
    """The override that keeps the operator of *node* in float32, where it is called from there."""
    where = _where(node)
    operator = operator_name(node.target).partition(".")[0]
    place = ""
    if where.module:
        place = f", module={where.module!r}"
    elif where.line:
        place = f", where='{Path(where.file).name}:{where.line}'"
    return f'.keep("float32", op={operator!r}{place})'
