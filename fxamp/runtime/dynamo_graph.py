"""Dynamo's graphs in the form that capture takes: sizes read from tensors, and split where it must be.

Dynamo hands sizes over as inputs of their own.  They are read from the tensors instead, so that capture
knows whose sizes they are, and one program serves all of them.

A graph is split around what the recorder does not take (a custom ``autograd.Function``, a checkpoint,
``torch.cond``, ``vmap``, an operator from outside of torch), and around the autocast regions of a model
that is called outside of any: there each region has casts of its own.  What is split off runs as it came.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.amp import autocast_mode
from torch.export import Dim
from torch.fx import Graph, GraphModule, Node
from torch.utils import checkpoint

from fxamp.ir.facts import size_of

__all__ = [
    "Inputs",
    "has_foreign_operators",
    "has_regions",
    "inputs_of",
    "must_split",
    "read_sizes_from_tensors",
    "split",
]

_MARKS = (autocast_mode._enter_autocast, autocast_mode._exit_autocast)
_FEWEST = 2  # operators that are worth a program


@dataclass(frozen=True)
class Inputs:
    """The inputs that a graph is left with.

    Attributes:
        kept: Their positions among those that Dynamo passes.
        symbolic: For each, which sizes Dynamo lets vary, in the form that capture takes.
    """

    kept: tuple[int, ...]
    symbolic: tuple[dict[int, Any] | None, ...]


def read_sizes_from_tensors(module: GraphModule) -> tuple[GraphModule, Inputs]:
    """A copy of *module* in which an input that is the size of a tensor is a ``size`` of that tensor."""
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    placeholders = graph.find_nodes(op="placeholder")
    owners = _owners(placeholders)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    kept: list[int] = []
    for index, node in enumerate(placeholders):
        value = node.meta.get("example_value")
        owner = owners.get(value.node.expr) if isinstance(value, torch.SymInt) else None
        if owner is None:
            kept.append(index)
            continue
        with graph.inserting_before(first):
            size = graph.call_method("size", owner)
        size.meta["example_value"] = value
        node.replace_all_uses_with(size)
        graph.erase_node(node)
    symbolic = tuple(_symbolic_sizes(placeholders[index].meta.get("example_value")) for index in kept)
    return GraphModule(module, graph, class_name="DynamoGraph"), Inputs(tuple(kept), symbolic)


def inputs_of(module: GraphModule) -> Inputs:
    """All inputs of *module*."""
    placeholders = module.graph.find_nodes(op="placeholder")
    symbolic = tuple(_symbolic_sizes(node.meta.get("example_value")) for node in placeholders)
    return Inputs(tuple(range(len(placeholders))), symbolic)


def _owners(placeholders: Sequence[Node]) -> dict[Any, tuple[Node, int]]:
    """For every size that is one symbol, a tensor and the dimension that has it."""
    owners: dict[Any, tuple[Node, int]] = {}
    for node in placeholders:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            for dim, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt):
                    owners.setdefault(size_of(size), (node, dim))
    return owners


def _symbolic_sizes(value: object) -> dict[int, Any] | None:
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    return {dim: Dim.DYNAMIC for dim, size in enumerate(value.shape) if isinstance(size, torch.SymInt)}


def has_regions(module: GraphModule) -> bool:
    """Whether the model enters or leaves autocast inside the graph."""
    return any(node.target in _MARKS for node in module.graph.nodes if node.op == "call_function")


def must_split(module: GraphModule) -> bool:
    """Whether there is something in the graph that the recorder does not take."""
    return any(isinstance(node.target, HigherOrderOperator) for node in module.graph.nodes) or any(
        _nesting(node) for node in module.graph.nodes
    )


def has_foreign_operators(module: GraphModule) -> bool:
    """Whether there are operators from outside of torch, which may have a gradient in Python."""
    return any(_is_foreign(node.target) for node in module.graph.nodes)


def split(module: GraphModule, piece: Callable[[GraphModule], nn.Module]) -> GraphModule:
    """*module* with every run of operators between two steps of Python made one call of ``piece(run)``.

    Args:
        module: A graph of Dynamo's.
        piece: Makes the module that stands for a run; it is called with the run's inputs and gives a tuple.
    """
    graph, nodes = Graph(), dict[Node, Node]()
    attributes: dict[str, Any] = dict(module.named_children())
    attributes.update(_tensor_attributes(module))
    runs = 0
    for python, group in _groups(module.graph):
        if python or sum(node.op != "get_attr" for node in group) < _FEWEST:
            for node in group:
                nodes[node] = graph.node_copy(node, nodes.__getitem__)
                _run_as_eager_does(nodes[node])
            continue
        run, inputs, outputs = _extract(module, group)
        name = f"piece_{runs}"
        runs += 1
        attributes[name] = piece(run)
        call = graph.call_module(name, tuple(nodes[node] for node in inputs))
        for index, node in enumerate(outputs):
            nodes[node] = graph.call_function(operator.getitem, (call, index))
    return GraphModule(attributes, graph, class_name="Pieces")


def _tensor_attributes(module: GraphModule) -> Iterator[tuple[str, Any]]:
    for node in module.graph.find_nodes(op="get_attr"):
        if not isinstance(value := operator.attrgetter(node.target)(module), nn.Module):
            yield node.target, value


def _groups(graph: Graph) -> Iterator[tuple[bool, list[Node]]]:
    """The nodes in order, in the longest runs of which none or all run as Python."""
    group: list[Node] = []
    last, depth = True, 0
    for node in graph.nodes:
        depth += max(_nesting(node), 0)
        python = depth > 0 or _is_python(node)
        depth += min(_nesting(node), 0)
        if python is not last and group:
            yield last, group
            group = []
        last = python
        group.append(node)
    yield last, group


def _is_python(node: Node) -> bool:
    if node.op in ("placeholder", "output"):
        return True
    if node.op == "get_attr":
        return any(isinstance(user.target, HigherOrderOperator) for user in node.users)
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return isinstance(node.args[0], Node) and isinstance(node.args[0].target, HigherOrderOperator)
    marks = (torch._C._set_grad_enabled, *_MARKS)
    return node.target in marks or isinstance(node.target, HigherOrderOperator) or _is_foreign(node.target)


def _is_foreign(target: object) -> bool:
    if isinstance(target, OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    return isinstance(target, OpOverload) and target.namespace not in ("aten", "prim", "prims")


def _nesting(node: Node) -> int:
    """1 where a transform of ``torch.func`` begins, -1 where one ends."""
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    return name.endswith("_increment_nesting") - name.endswith("_decrement_nesting")


def _extract(module: GraphModule, group: list[Node]) -> tuple[GraphModule, list[Node], list[Node]]:
    """A graph of the nodes in *group*, the nodes that it reads, and those of its own that others read."""
    members = set(group)
    inputs = list(dict.fromkeys(n for node in group for n in node.all_input_nodes if n not in members))
    outputs = [node for node in group if any(user not in members for user in node.users)]
    graph, nodes = Graph(), dict[Node, Node]()
    for node in inputs:
        nodes[node] = graph.placeholder(node.name)
        nodes[node].meta["example_value"] = node.meta.get("example_value")
    for node in group:
        nodes[node] = graph.node_copy(node, nodes.__getitem__)
    graph.output(tuple(nodes[node] for node in outputs))
    return GraphModule(module, graph, class_name="Piece"), inputs, outputs


def _run_as_eager_does(node: Node) -> None:
    """A checkpoint is run by ``torch.utils.checkpoint``: the operator itself would not keep random state."""
    if getattr(node.target, "_name", "") == "tag_activation_checkpoint":
        node.target = checkpoint.checkpoint
