"""Where a constant goes, and which operators have to compute in float32 for it to be kept.

Forwards: a value that is moved, viewed, filled in or converted is still that value; one that is huge is still
huge after something has been added.  It is lost where it *lands* in low precision: at a cast, or as a float32
number (a tensor without dimensions) in an operator whose other arguments are low.

Backwards: an operator that computes can be kept in float32 by an override.  One that only moves or fills
takes the dtype of what it is given, so what has computed that is to be kept.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch._ops import OpOverload
from torch.fx import Node

from fxamp.export.roles import Role, arguments_with, base_name, role_of
from fxamp.ir.blocks import is_source
from fxamp.ir.facts import fact_of_node
from fxamp.ir.operators import is_inplace
from fxamp.policy.passive import is_passive

__all__ = ["Landing", "is_low", "is_wide", "keepers", "landings"]

_ADDS = frozenset({"add", "sub", "subtract", "rsub", "neg", "abs"})
_WRITES = frozenset(
    {
        "fill", "copy", "masked_fill", "index_fill", "index_copy", "index_put", "masked_scatter", "scatter",
        "squeeze", "unsqueeze", "transpose", "t",
    }
)  # fmt: skip
_CONVERTS = frozenset(
    {"to", "_to_copy", "type_as", "half", "bfloat16", "copy", "index_put", "masked_scatter"}
)


@dataclass(frozen=True)
class Landing:
    """Where a value of float32 becomes one of low precision.

    Attributes:
        node: The cast, or the operator that takes it as a number.
        dtype: The low precision dtype.
        role: What that operator does with it; ``None`` at a cast.
        after_sum: Whether something may have been added to the value before.
    """

    node: Node
    dtype: torch.dtype
    role: Role | None = None
    after_sum: bool = False


def is_low(node: object) -> bool:
    """Whether *node* is a tensor of a floating dtype narrower than float32."""
    fact = fact_of_node(node)
    return fact is not None and fact.dtype.is_floating_point and fact.dtype.itemsize < _SINGLE


def is_wide(node: object) -> bool:
    """Whether *node* is a tensor of float32 or float64."""
    fact = fact_of_node(node)
    return fact is not None and fact.dtype.is_floating_point and fact.dtype.itemsize >= _SINGLE


_SINGLE = 4


# --- forwards -----------------------------------------------------------------------------------------


def landings(source: Node) -> list[Landing]:
    """Where *source*, a value of float32, becomes one of low precision."""
    direct = {user for user, _ in _walk(source, lambda node: is_wide(node) and _moves(node))}
    found: dict[Node, Landing] = {}
    for node, value in _walk(source, lambda node: is_wide(node) and (_moves(node) or _adds(node))):
        fact = fact_of_node(node)
        if fact is None or not is_low(node):
            continue
        if _converts(node):
            found[node] = Landing(node, fact.dtype, None, node not in direct or _adds(node))
        elif isinstance(node.target, OpOverload) and _is_number(value):
            roles = [role_of(node.target, argument) for argument in arguments_with(node, value)]
            if roles and roles[0] is not None:
                found[node] = Landing(node, fact.dtype, roles[0], node not in direct)
    return list(found.values())


def _converts(node: Node) -> bool:
    """Whether float32 values come out in low precision; what is added in place takes the dtype of the sum."""
    if not isinstance(node.target, OpOverload):
        return False
    return base_name(node.target) in _CONVERTS or (_adds(node) and is_inplace(node.target))


def _walk(source: Node, passes_on: Callable[[Node], bool]) -> Iterator[tuple[Node, Node]]:
    """The users of *source* and of what passes it on, each with the value that it uses."""
    waiting = [source, *_written_base(source)]
    seen = set(waiting)
    while waiting:
        value = waiting.pop()
        for user in value.users:
            yield user, value
            if user not in seen and passes_on(user):
                shown = _written_base(user)
                waiting += [node for node in (user, *shown) if node not in seen]
                seen |= {user, *shown}


def _written_base(node: Node) -> list[Node]:
    """What *node* shows a part of and writes to: later users of that see what is written."""
    bases: list[Node] = []
    if isinstance(node.target, OpOverload) and is_inplace(node.target):
        base = node.args[0]
        while isinstance(base, Node) and base.op == "call_function":
            bases.append(base)
            base = base.args[0] if _is_view(base) else None
        bases += [base] if isinstance(base, Node) else []
    return bases


def _is_view(node: Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return node.target is operator.getitem
    return any(returned.alias_info is not None for returned in node.target._schema.returns)


def _moves(node: Node) -> bool:
    """Whether values of the arguments are values of the result."""
    if not isinstance(node.target, OpOverload):
        return node.target is operator.getitem
    return _is_move(node.target)


@cache
def _is_move(target: OpOverload) -> bool:
    name = base_name(target)
    if is_inplace(target):
        return name in _WRITES
    return is_passive(target) and not name.endswith("_like") and not name.startswith(("new_", "sym_", "is_"))


def _adds(node: Node) -> bool:
    """Whether a huge value among the arguments makes a huge one of the result."""
    return isinstance(node.target, OpOverload) and base_name(node.target) in _ADDS


def _is_number(value: Node) -> bool:
    """Whether *value* has no dimensions, so that it does not decide the dtype of a result."""
    fact = fact_of_node(value)
    return fact is not None and not fact.shape


# --- backwards ----------------------------------------------------------------------------------------


def keepers(places: Iterable[Node], *, huge: bool, flows: bool) -> list[Node]:
    """The operators that have to compute in float32 for what is lost at *places* to be kept there.

    Args:
        places: Casts and rounded weights that the value is lost in, or operators that lose a number.
        huge: Whether the value is beyond low precision, so that it stays so where something is added to it.
        flows: Whether the value goes on in their results, so that casts to come would lose it again.
    """
    found: dict[Node, None] = {}
    for place in places:
        if "inserted" in place.meta or is_source(place):
            found |= dict.fromkeys(_consumers(place, huge=huge))
            continue
        found |= dict.fromkeys([place] if _computes(place) else _producers(place))
        if flows:
            found |= dict.fromkeys(_consumers(place, huge=huge))
    return list(found)


def _consumers(place: Node, *, huge: bool) -> Iterator[Node]:
    """The operators that take the value of *place* in low precision since their rule says so."""
    for node, _ in _walk(place, lambda node: _moves(node) or (huge and _adds(node))):
        decision = node.meta.get("decision")
        if _computes(node) and decision is not None and decision.target is decision.low:
            yield node


def _producers(place: Node) -> Iterator[Node]:
    """The nearest operators that have computed the low precision values that *place* moves."""
    waiting = [place, *(() if _takes_floats(place) else place.users)]  # one that makes values meets others
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        for value in node.all_input_nodes:
            if value in seen or not is_low(value):
                continue
            seen.add(value)
            if _computes(value):
                yield value
            elif "inserted" not in value.meta:
                waiting.append(value)


def _takes_floats(node: Node) -> bool:
    return any(is_low(value) for value in node.all_input_nodes)


def _computes(node: Node) -> bool:
    """Whether an override can choose the precision of *node*."""
    return isinstance(node.target, OpOverload) and not is_passive(node.target) and bool(node.all_input_nodes)
