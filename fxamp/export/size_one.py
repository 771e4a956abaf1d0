"""A size that is symbolic stands for two and more; whether the artifact also serves one is found out here.

``torch.export`` takes a symbolic size for neither 0 nor 1 while it traces, and lets the loaded program be
called with both.  Where the model asks whether a size is one, such a program gives other bits than the model.
So the model is captured once more with a size of one: if it runs other operators, the artifact refuses it.

A model that reads values is written the way that it has for exporters, which may call other kernels than the
model itself.  Such a model is also run both ways with a size of one, and refuses it if the bits differ.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from fxamp.capture.structure import flatten, unflatten
from fxamp.capture.tracer_checks import exporter_seen
from fxamp.errors import FxampError
from fxamp.export.check import differences
from fxamp.export.deployed import Deployed, deploy
from fxamp.runtime.frozen_module import FrozenModule
from fxamp.runtime.program import Program

__all__ = ["refuse_other_ones"]


def refuse_other_ones(program: ExportedProgram, deployed: Deployed) -> tuple[str, ...]:
    """Write an assertion into *program* for each symbolic size that may not be one; a line for each."""
    found = []
    for symbol, (place, dim) in _symbols(program).items():
        if program.range_constraints[symbol].lower > 2:
            continue
        why = _difference_at_one(deployed, program, symbol)
        if why:
            _assert_not_one(program.graph, place, dim, why)
            found.append(f"size {dim} of {place.name} is at least 2: {why}")
    if found:
        program.graph_module.recompile()
    return tuple(found)


def _inputs(program: ExportedProgram) -> list[Node]:
    names = program.graph_signature.user_inputs
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    return [nodes[name] for name in names if isinstance(name, str) and name in nodes]


def _symbols(program: ExportedProgram) -> dict[Any, tuple[Node, int]]:
    """The symbolic sizes of the inputs, each with one place where it is."""
    found: dict[Any, tuple[Node, int]] = {}
    for node in _inputs(program):
        value = node.meta.get("val")
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                found.setdefault(size.node.expr, (node, dim))
    return {symbol: place for symbol, place in found.items() if symbol in program.range_constraints}


_OTHER_OPERATORS = "for 1 the model runs other operators"
_OTHER_BITS = "for 1 the way that the model has for exporters gives other bits than the model"


def _difference_at_one(deployed: Deployed, program: ExportedProgram, symbol: Any) -> str:
    """What is not as in *program* in a call with *symbol* as one; ``""`` if nothing is."""
    spec, leaves = flatten(deployed.in_model_dtypes())
    tensors = [node for node in _inputs(program) if isinstance(node.meta.get("val"), torch.Tensor)]
    if len(tensors) != len(leaves):
        return _OTHER_OPERATORS
    small = [_narrowed(leaf, node, symbol) for leaf, node in zip(leaves, tensors, strict=True)]
    frozen = FrozenModule(deployed.frozen._tree, deployed.frozen._options, deployed.frozen._unfolded)
    args, kwargs = unflatten(spec, small, [])
    with nullcontext() if deployed.original is None else exporter_seen():
        try:
            frozen.capture(*args, **kwargs)
        except FxampError:
            return _OTHER_OPERATORS
        other = frozen._runner.last
        if other is None or not _are_alike(deployed.program, other):
            return _OTHER_OPERATORS
        if deployed.original is None:
            return ""
        one = replace(deploy(frozen, args, kwargs, deployed.contract), original=deployed.original)
    return _OTHER_BITS if differences(one.of_graph(), one.reference()) else ""


def _narrowed(leaf: torch.Tensor, node: Node, symbol: Any) -> torch.Tensor:
    for dim, size in enumerate(node.meta["val"].shape):
        if isinstance(size, torch.SymInt) and symbol in size.node.expr.free_symbols:
            least = size.node.expr.xreplace({symbol: sympy.Integer(1)})
            leaf = leaf.narrow(dim, 0, int(least)) if least.is_number else leaf
    return leaf.contiguous()


def _are_alike(program: Program, other: Program) -> bool:
    """Whether two programs run the same operators on the same values; sizes may be numbers in *other*."""
    if program.result != other.result or program.operator is not None or other.operator is not None:
        return False
    pairs: dict[Node, Node] = {}
    nodes, others = list(_tensor_nodes(program.module)), list(_tensor_nodes(other.module))
    if len(nodes) != len(others):
        return False
    for node, twin in zip(nodes, others, strict=True):
        pairs[node] = twin
        if node.op != twin.op or (node.op != "placeholder" and node.target != twin.target):
            return False
        if not _same((node.args, node.kwargs), (twin.args, twin.kwargs), pairs):
            return False
    return True


def _tensor_nodes(module: nn.Module) -> Iterator[Node]:
    graph: Any = module.graph
    for node in graph.nodes:
        if node.op != "call_function" or (node.meta.get("fact") is not None and _unsliced(node) is node):
            yield node


def _unsliced(node: Node) -> Node:
    """What *node* is all of.

    ``x[:, 0]`` makes a slice from 0 to the end only if the size is symbolic, and ``x.contiguous()`` a node
    only if *x* may have to be copied.
    """
    while _is_whole(node):
        node = node.all_input_nodes[0]
    return node


def _is_whole(node: Node) -> bool:
    if node.target in (torch.ops.aten.alias.default, torch.ops.aten.contiguous.default):
        return True
    return node.target is torch.ops.aten.slice.Tensor and node.args[2:] == (0, sys.maxsize)


def _same(one: Any, other: Any, pairs: dict[Node, Node]) -> bool:
    one, other = (_unsliced(value) if isinstance(value, Node) else value for value in (one, other))
    if isinstance(one, Node):
        if one in pairs:
            return pairs[one] is other
        return not isinstance(other, Node) or other.meta.get("fact") is None  # a size
    if isinstance(one, (list, tuple)):
        alike = isinstance(other, (list, tuple)) and len(one) == len(other)
        return alike and all(_same(a, b, pairs) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key], pairs) for key in one)
    return type(one) is type(other) and bool(one == other)


def _assert_not_one(graph: Graph, place: Node, dim: int, why: str) -> None:
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(last):
        size = graph.call_function(torch.ops.aten.sym_size.int, (place, dim))
    size.meta["val"] = place.meta["val"].shape[dim]
    with graph.inserting_after(size):
        enough = graph.call_function(operator.ge, (size, 2))
    enough.meta["val"] = size.meta["val"] >= 2
    text = f"size {dim} of {place.name} must be at least 2: {why}"
    with graph.inserting_after(enough):
        graph.call_function(torch.ops.aten._assert_scalar.default, (enough, text)).meta["val"] = None
