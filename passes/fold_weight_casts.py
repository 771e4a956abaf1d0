"""Read the rounded copy of a weight instead of casting the weight, in a module whose weights do not change.

The copy is the very cast, made once, so its uses get the same bits.  Rounding and moving data can change
places, so ``cast(move(weight))`` becomes ``move(copy)``, where both give the same strides, too: a kernel may
choose its order of summation by them.  That is so for

* views with all elements of a dense weight (``t``, ``view``, ...), whose strides a cast keeps;
* rows of a contiguous weight (``weight[3]``, ``weight[2:4]``, ``weight.chunk(3)``), which are dense
  themselves, where they begin in the copy at an address that an allocation could have (``ir/layouts.py``);
* copies (``weight[index]``, ``embedding``), in a graph that writes to nothing: the new tensor is the model's
  to write to, perhaps through a view.

A weight that is spread over a size of the call (``token.expand(batch, -1, -1)``) has more elements than
memory, and a cast of it has memory for all.  So there ``cast(move(weight))`` becomes ``clone(move(copy))``:
a clone lays out its result by the rule of a cast, and reads half the bytes.

No gradient reaches the weight any more: inference-exact.  The switches that let a cast record gradients
(``insert-casts``) go with the casts between them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from fxamp.ir.edits import note_edit
from fxamp.ir.facts import Facts, fact_of_node
from fxamp.ir.layouts import layout_of
from fxamp.ir.operators import TO_DTYPE, is_to_dtype, is_write
from fxamp.passes.base import Pass

__all__ = ["FoldWeightCasts", "drop_switches", "is_cast_of_weight"]

_aten = torch.ops.aten
_VIEWS = frozenset(
    {
        _aten.t.default, _aten.transpose.int, _aten.permute.default, _aten.numpy_T.default, _aten.mT.default,
        _aten.view.default, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.squeeze.default,
        _aten.unflatten.int,
    }
)  # fmt: skip
_ROWS = frozenset({_aten.select.int, _aten.slice.Tensor})
_PARTS = frozenset(
    {
        _aten.chunk.default, _aten.split.Tensor, _aten.split.sizes, _aten.split_with_sizes.default,
        _aten.unbind.int,
    }
)  # fmt: skip
_COPIES = frozenset(
    {
        _aten.index.Tensor, _aten.index_select.default, _aten.embedding.default, _aten.reshape.default,
        _aten.flatten.using_ints, _aten.repeat.default,
    }
)  # fmt: skip
_SPREADS = frozenset({_aten.expand.default, _aten.expand_as.default})


@dataclass(frozen=True)
class FoldWeightCasts(Pass):
    """No cast of a weight is left in the graph, nor one of a weight that is only moved before.

    Attributes:
        weights: The targets of the ``get_attr`` nodes that are weights which nothing writes to, and whether
            each is contiguous.  A node that this pass makes has the weight's target and the dtype in its
            ``meta["rounded"]``.
    """

    name: ClassVar[str] = "fold-weight-casts"
    weights: Mapping[str, bool]

    def run(self, graph: Graph) -> bool:
        changed = False
        moves = _VIEWS if any(map(is_write, graph.nodes)) else _VIEWS | _COPIES
        for node in list(graph.nodes):
            if node.op == "get_attr" and node.target in self.weights and "rounded" not in node.meta:
                changed |= _fold(graph, node, moves, contiguous=self.weights[str(node.target)])
        return drop_switches(graph) or changed


def is_cast_of_weight(node: Node) -> bool:
    """Whether *node* is a cast that autocast makes, to a low precision dtype."""
    return is_to_dtype(node) and "inserted" in node.meta and node.args[1] in (torch.float16, torch.bfloat16)


def _fold(graph: Graph, weight: Node, moves: frozenset[OpOverload], *, contiguous: bool) -> bool:
    spread = list(_casts_of_spread(weight, moves)) if contiguous else []
    behind = [*_casts_behind(weight, moves, contiguous=contiguous), *spread]
    for cast in [*behind, *filter(is_cast_of_weight, weight.users)]:
        what = f"read from the rounded copy of %{weight.name}"
        note_edit(graph, cast, FoldWeightCasts.name, "inference-exact", what, "the weight does not change")
    low: dict[object, dict[Node, Node]] = {}
    for cast in behind:
        _cast_before_moves(graph, weight, cast, low.setdefault(cast.args[1], {}), clone=cast in spread)
    changed = bool(behind)
    copies: dict[torch.dtype, Node] = {}
    for cast in [user for user in weight.users if is_cast_of_weight(user)]:
        dtype = cast.args[1]
        assert isinstance(dtype, torch.dtype)
        if dtype not in copies:
            copies[dtype] = _copy(graph, weight, cast, dtype)
        cast.replace_all_uses_with(copies[dtype])
        graph.erase_node(cast)
        changed = True
    if not weight.users and changed:
        graph.erase_node(weight)
    return changed


def drop_switches(graph: Graph) -> bool:
    """Erase the pairs of switches, of whether gradients are recorded, that casts have stood between."""
    empty = [
        node
        for node in graph.nodes
        if "written" in node.meta and node.args == (True,) and node.next.meta.get("written")
    ]
    for node in empty:
        graph.erase_node(node.next)
        graph.erase_node(node)
    return bool(empty)


def _copy(graph: Graph, weight: Node, cast: Node, dtype: torch.dtype) -> Node:
    """The source that stands for *cast* from now on."""
    with graph.inserting_after(weight):
        copy = graph.create_node("get_attr", f"{weight.target}_{dtype.abbr}", name=f"{weight.name}_low")
    copy.meta.update(fact=cast.meta["fact"], rounded=(weight.target, dtype), where=cast.meta.get("where"))
    return copy


def _casts_behind(node: Node, moves: frozenset[OpOverload], *, contiguous: bool) -> Iterator[Node]:
    """The casts of what *moves*, and rows of a *contiguous* tensor, make of *node*."""
    for user in node.users:
        if user.args[:1] != (node,):
            continue
        rows = _rows_of(user) if contiguous else []
        for moved in rows or ([user] if user.target in moves else []):
            for after in moved.users:
                if is_cast_of_weight(after) and (not rows or _begins_like_a_copy(moved)):
                    yield after
            yield from _casts_behind(moved, moves, contiguous=bool(rows))


def _casts_of_spread(node: Node, moves: frozenset[OpOverload], *, spread: bool = False) -> Iterator[Node]:
    """The casts of views, and of what *moves*, make of *node* where something on the way spreads it."""
    for user in node.users:
        if spread and is_cast_of_weight(user):
            yield user
        elif user.args[:1] == (node,) and user.target in moves | _ROWS | _SPREADS:
            yield from _casts_of_spread(user, moves, spread=spread or user.target in _SPREADS)


def _rows_of(node: Node) -> list[Node]:
    """The nodes that stand for rows of a tensor, if *node* takes rows: itself, or its parts."""
    if node.target in _ROWS and node.args[1:2] == (0,) and node.args[4:] in ((), (1,)):
        return [node]
    dimension = node.args[1:2] if node.target is _aten.unbind.int else node.args[2:3]
    if node.target in _PARTS and dimension in ((), (0,)) and not node.kwargs:
        return [user for user in node.users if user.target is operator.getitem]
    return []


def _begins_like_a_copy(rows: Node) -> bool:
    """Whether *rows* begin, in a copy of the whole in 16 bits, where a copy of them alone could begin."""
    layout = layout_of(rows)
    return layout is not None and layout.is_aligned(torch.bfloat16)


def _cast_before_moves(graph: Graph, weight: Node, cast: Node, low: dict[Node, Node], *, clone: bool) -> None:
    """Cast *weight* and move that instead, and *clone* it where there was the cast.

    *low* has what is moved so far in the dtype of *cast*.
    """
    moves: list[Node] = []
    node = cast.args[0]
    while node is not weight:
        assert isinstance(node, Node)
        moves.append(node)
        node = node.args[0]
    if weight not in low:
        with graph.inserting_after(weight):
            low[weight] = graph.call_function(TO_DTYPE, (weight, cast.args[1]))
        low[weight].meta.update(cast.meta, fact=_cast_fact(weight.meta["fact"], cast))
    value = low[weight]
    for move in reversed(moves):
        if move not in low:
            with graph.inserting_after(move):
                low[move] = _on_another(graph, move, value)
            low[move].meta["fact"] = _cast_fact(move.meta["fact"], cast)
        value = low[move]
    if clone:
        with graph.inserting_before(cast):
            value = graph.call_function(_aten.clone.default, (value,))
        value.meta.update(cast.meta)
        value.meta.pop("inserted")
    cast.replace_all_uses_with(value)
    for dead in (cast, *moves):
        if not dead.users:
            graph.erase_node(dead)


def _on_another(graph: Graph, move: Node, value: Node) -> Node:
    """*move* of *value* instead of its first argument."""
    moved = graph.node_copy(move, lambda node: node)
    moved.args = (value, *move.args[1:])
    moved.meta.pop("val", None)
    return moved


def _cast_fact(fact: Facts, cast: Node) -> Facts:
    """*fact* of what is moved, in the dtype of *cast*."""
    if isinstance(fact, tuple):
        return tuple(_cast_fact(each, cast) for each in fact)
    to = fact_of_node(cast)
    assert fact is not None
    assert to is not None
    return replace(fact, dtype=to.dtype, leaf=False, requires_grad=False)
