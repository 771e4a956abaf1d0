"""Which values of a graph may share memory, and where that memory is written to.

A cast may be dropped, shared or moved only where nobody writes to what it reads or to what it gives, and
where nobody outside can tell the two apart.  Values that may share memory are one group here; what cannot
be ruled out is taken to be so:

* an operator's schema says which arguments its results may be views of; a composite one may also hand back
  an argument without saying so, which the recorded fake tensors tell;
* all inputs may be views of the same memory; a parameter or buffer shares its memory with no other;
* Python code (a custom ``autograd.Function``, a checkpointed block) may do anything with what it is given.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node

from fxamp.ir.facts import Fact
from fxamp.ir.operators import WRITES_UNSAID, is_composite, is_plain_cast
from fxamp.ir.regions import run_in_region

__all__ = ["Memory"]

# Composites that give back their argument where there is nothing to do, and whose schemas do not say so.
_MAY_GIVE_BACK = frozenset(
    {
        "aten::dropout",
        "aten::alpha_dropout",
        "aten::feature_dropout",
        "aten::feature_alpha_dropout",
        "aten::type_as",
        "aten::meshgrid",
        "aten::meshgrid.indexing",
        "aten::broadcast_tensors",
        "aten::atleast_1d",
        "aten::atleast_2d",
        "aten::atleast_3d",
    }
)
# Composites that always give new memory, which is needed where the fakes that would tell are gone.
_ALWAYS_NEW = frozenset(
    {
        "aten::batch_norm",
        "aten::conv1d",
        "aten::conv2d",
        "aten::conv3d",
        "aten::conv_transpose1d",
        "aten::conv_transpose2d.input",
        "aten::conv_transpose3d.input",
        "aten::group_norm",
        "aten::layer_norm",
        "aten::linear",
        "aten::matmul",
        "aten::scaled_dot_product_attention",
    }
)
# Casts that are not written as ``to.dtype``: they give back their argument only in the dtype that it has.
_CASTS = frozenset({"aten::to.device", "aten::to.dtype_layout", "aten::to.other", "aten::type_as"})
_UNSAID = ("running_mean", "running_var")


class Memory:
    """The groups of *graph*'s values, as the graph is now; a node that is added later is in none.

    Args:
        graph: A graph.
        recorded: Whether a composite operator that may give a view or a copy (``reshape``) gives what it gave
            when it was recorded.  So it does for the strides that it was recorded with: not where a pass has
            another cast in front of it in mind.
    """

    def __init__(self, graph: Graph, *, recorded: bool = False) -> None:
        self._above: dict[Node, Node] = {}
        self.order: dict[Node, int] = {}
        self._writes: dict[Node, list[int]] = {}
        self._left: set[Node] = set()
        written: list[tuple[Node, int]] = []
        escaping: list[Node] = []
        first_input: Node | None = None
        for position, node in enumerate(graph.nodes):
            self.order[node] = position
            if node.op == "placeholder":
                first_input = first_input or node
                self._join(node, first_input)
            elif node.op == "output":
                escaping += node.all_input_nodes
            elif node.op == "call_function":
                for argument in _shared(node, recorded=recorded):
                    self._join(node, argument)
                written += [(argument, position) for argument in _written(node)]
        for node, position in written:
            self._writes.setdefault(self.group(node), []).append(position)
        self._left = {self.group(node) for node in escaping}

    def group(self, node: Node) -> Node:
        """One node that stands for all that may share memory with *node*."""
        root = node
        while (above := self._above.get(root, root)) is not root:
            root = above
        while (above := self._above.get(node, node)) is not root:
            self._above[node], node = root, above
        return root

    def is_written(self, node: Node) -> bool:
        """Whether anything writes to the memory of *node*."""
        return self.group(node) in self._writes

    def is_written_between(self, node: Node, first: Node, last: Node) -> bool:
        """Whether anything from *first* to *last* writes to the memory of *node*."""
        start, end = self.order[first], self.order[last]
        return any(start <= position <= end for position in self._writes.get(self.group(node), ()))

    def last_write(self, node: Node) -> int:
        """The place of the last node that writes to the memory of *node*."""
        return self._writes[self.group(node)][-1]

    def escapes(self, node: Node) -> bool:
        """Whether an output of the graph has the memory of *node*."""
        return self.group(node) in self._left

    def is_private(self, node: Node) -> bool:
        """Whether nobody writes to the memory of *node*, and no output of the graph has it."""
        group = self.group(node)
        return group not in self._writes and group not in self._left

    def _join(self, one: Node, other: Node) -> None:
        self._above[self.group(one)] = self.group(other)


def _call(node: Node) -> tuple[object, tuple[Any, ...]]:
    if node.target is run_in_region:
        return node.args[1], node.args[2:]
    return node.target, node.args


def _arguments(node: Node) -> Iterator[tuple[torch.Argument, list[Node]]]:
    target, args = _call(node)
    assert isinstance(target, OpOverload)
    for index, argument in enumerate(target._schema.arguments):
        value = args[index] if index < len(args) else node.kwargs.get(argument.name)
        items = value if isinstance(value, (list, tuple)) else [value]
        nodes = [item for item in items if isinstance(item, Node) and item.meta.get("fact") is not None]
        if nodes:
            yield argument, nodes


def _shared(node: Node, *, recorded: bool) -> list[Node]:
    """The inputs that a result of *node* may share memory with."""
    target, _ = _call(node)
    if not isinstance(target, OpOverload):
        may = target is operator.getitem or not _is_arithmetic(target)
        return [given for given in node.all_input_nodes if given.meta.get("fact") is not None] if may else []
    if is_plain_cast(node):  # to the dtype that it has it would be gone
        return []
    if target.name() in _CASTS and _changes_dtype(node):
        return []
    shared: list[Node] = []
    silent = target.name() in _MAY_GIVE_BACK
    composite = silent or target.namespace != "aten" or is_composite(target)
    composite = composite and target.name() not in _ALWAYS_NEW
    for argument, nodes in _arguments(node):
        told = silent or argument.alias_info is not None
        if told and not (recorded and composite):
            shared += nodes
        elif told or composite:
            shared += [given for given in nodes if _may_overlap(node, given)]
    return shared


def _written(node: Node) -> list[Node]:
    """The inputs that *node* writes to."""
    target, _ = _call(node)
    if not isinstance(target, OpOverload):
        return [] if target is operator.getitem or _is_arithmetic(target) else node.all_input_nodes
    unsaid = target.name() in WRITES_UNSAID
    return [
        given
        for argument, nodes in _arguments(node)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or (unsaid and argument.name in _UNSAID)
        for given in nodes
    ]


def _is_arithmetic(target: object) -> bool:
    return getattr(target, "__module__", "") in ("_operator", "math", "torch")


def _changes_dtype(cast: Node) -> bool:
    one, other = cast.meta.get("fact"), _arguments_of(cast)[0].meta.get("fact")
    return isinstance(one, Fact) and isinstance(other, Fact) and one.dtype is not other.dtype


def _arguments_of(node: Node) -> tuple[Any, ...]:
    _, args = _call(node)
    return args


def _may_overlap(node: Node, given: Node) -> bool:
    """Whether the recorded fakes share memory; where there are none, they may."""
    one, other = _memories(node.meta.get("val")), _memories(given.meta.get("val"))
    return one is None or other is None or not one.isdisjoint(other)


def _memories(value: Any) -> set[int] | None:
    if isinstance(value, (list, tuple)):
        parts = [_memories(item) for item in value]
        return None if None in parts else {key for part in parts if part is not None for key in part}
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return {value.untyped_storage()._cdata}
    return None
