"""A graph as text, dtypes first: ``%x_bf16: bf16[s0, 8] = to(%x, bf16)``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from fxamp.ir.facts import Fact
from fxamp.ir.operators import operator_name
from fxamp.ir.region_code import is_named

__all__ = ["show", "tuple_text"]


def show(graph: Graph | GraphModule) -> str:
    """One line a node; sub-graphs follow, indented, under their names.

    Example:
        >>> print(show(torch.fx.symbolic_trace(lambda x: torch.relu(x))))
        %x: ? = input
        %relu: ? = relu(%x)
        return %relu
    """
    if isinstance(graph, Graph):
        return "\n".join(_line(node) for node in graph.nodes)
    lines = [show(graph.graph)]
    for name, child in graph.named_children():
        if isinstance(child, GraphModule):
            lines.append(f"{name}:\n" + "\n".join(f"    {line}" for line in show(child).splitlines()))
    return "\n".join(lines)


def tuple_text(items: Sequence[object]) -> str:
    """Python's text of the tuple of what *items* are the texts of: ``(a, b)``, ``(a,)``, ``()``."""
    return f"({', '.join(map(str, items))}{',' if len(items) == 1 else ''})"


def _line(node: Node) -> str:
    if node.op == "output":
        return f"return {_value(node.args[0])}"
    if node.op == "placeholder":
        return f"%{node.name}: {_facts(node.meta.get('fact'))} = input"
    if node.op == "get_attr":
        return f"%{node.name}: {_facts(node.meta.get('fact'))} = {node.target}"
    values = [_value(arg) for arg in node.args]
    values += [f"{key}={_value(value)}" for key, value in node.kwargs.items()]
    call = f"{_operator(node)}({', '.join(values)})"
    if "fact" in node.meta and node.meta["fact"] is None:
        return call if not node.users else f"%{node.name} = {call}"
    return f"%{node.name}: {_facts(node.meta.get('fact'))} = {call}"


def _operator(node: Node) -> str:
    name = operator_name(node.target)
    if name.startswith("aten::"):
        name = name.removeprefix("aten::")
        return name if name.endswith("_") else name.split(".")[0]
    return name


def _facts(facts: object) -> str:
    if isinstance(facts, Fact):
        return str(facts)
    if isinstance(facts, tuple):
        return f"({', '.join(_facts(fact) for fact in facts)})"
    return "?"


def _value(value: object) -> str:
    if isinstance(value, Node):
        return f"%{value.name}"
    if isinstance(value, torch.dtype):
        return value.abbr
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_value(item) for item in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_value(item)}" for key, item in value.items()) + "}"
    if is_named(value):
        return str(value)
    if isinstance(value, OpOverload):
        return operator_name(value)
    return repr(value)
