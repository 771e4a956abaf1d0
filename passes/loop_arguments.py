"""Which arguments of a loop over time are given cast: those that eager autocast casts once, or as good as.

Without gradients every cast of one tensor has the same bits, so each weight and the input are cast once.
With gradients it matters how often: the gradients of several casts are summed in float32, those of several
uses of one cast in low precision.  Eager keeps the cast of a leaf; a view of one, and what is no leaf, it
casts in every step, and so does the loop, inside of its region.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node
from torch.fx.node import Argument

from fxamp.ir.facts import fact_of_node
from fxamp.ir.operators import arguments_in_order

__all__ = ["values_given_cast"]

_GIVEN_ONCE = ("input", "data", "params")  # what only ``linear`` and ``matmul`` see, which cast it
_WEIGHTS, _BIASES = 2, 2  # of a cell; a projection has one more weight, the last


def values_given_cast(node: Node) -> Iterator[tuple[str, int, Node]]:
    """The name of the argument, the place in it, and the value, for each that may be cast before *node*."""
    named = {argument.name: value for argument, value in arguments_in_order(node)}
    for name in _GIVEN_ONCE:
        value = named.get(name)
        for place, item in enumerate(value if isinstance(value, (list, tuple)) else [value]):
            if isinstance(item, Node) and _is_cast_once(node, item, viewed=_is_viewed(name, place, named)):
                yield name, place, item


def _is_cast_once(node: Node, value: Node, *, viewed: bool) -> bool:
    fact = fact_of_node(value)
    if fact is None or not (fact.requires_grad and node.meta["grad"]):
        return True
    return fact.leaf and not viewed and bool(node.meta["region"].cache)


def _is_viewed(name: str, place: int, named: dict[str, Argument]) -> bool:
    """Whether the loop casts a view of the argument (aten/src/ATen/native/RNN.cpp)."""
    if name == "input":
        return bool(named["batch_first"])  # ``transpose``
    if name == "data":
        return False
    each = _WEIGHTS + (_BIASES if named["has_biases"] else 0)
    return _is_projected(named["hx"]) and place % (each + 1) == each  # ``w_hr.t()``


def _is_projected(state: Argument) -> bool:
    if not isinstance(state, (list, tuple)):
        return False
    hidden, cell = (fact_of_node(each) for each in state)
    return hidden is not None and cell is not None and hidden.shape[2] != cell.shape[2]
