"""What an exported model draws at random, which an ONNX runtime does not draw as torch does.

A runtime has its own generator, and leaves dropout out, as in evaluation.  Under torch dropout with
``training=True``, or attention with a ``dropout_p``, drops in evaluation, too.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from fxamp.ir.operators import arguments_in_order

__all__ = ["random_notes"]

_OFF = frozenset({"p", "dropout_p", "train", "training", "dropout"})
"""Arguments of operators that draw, by name: where one of them is 0 or ``False``, nothing is drawn."""


def random_notes(program: ExportedProgram) -> list[str]:
    """A line on the operators of *program* that draw random numbers, if there are any."""
    graphs = [each.graph for each in program.graph_module.modules() if isinstance(each, GraphModule)]
    drawing = sorted({str(node.target) for graph in graphs for node in graph.nodes if _draws(node)})
    if not drawing:
        return []
    return [f"random numbers of {', '.join(drawing)}: an ONNX runtime draws others, and leaves dropout out"]


def _draws(node: Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    schema = target._schema.arguments
    values = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    values |= {argument.name: value for argument, value in arguments_in_order(node)}
    return all(values[name] for name in _OFF & values.keys())
