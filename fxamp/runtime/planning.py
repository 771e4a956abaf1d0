"""What was decided, in the form of a plan file; and how a program differs from a plan."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Iterable

import torch
from torch.fx import GraphModule, Node

from fxamp.errors import PlanWarning
from fxamp.ir.facts import dtype_names
from fxamp.ir.operators import operator_name
from fxamp.ir.regions import run_in_region
from fxamp.ir.text import show
from fxamp.policy import Policy
from fxamp.policy.plan import Plan, PlannedGraph, PlannedOperator
from fxamp.runtime.program import Program

__all__ = ["compare_with_plan", "plan_of", "planned"]

_SYMBOL = re.compile(r"\b[su]\d+\b")


def plan_of(policy: Policy, programs: Iterable[Program]) -> Plan:
    """The plan of *programs*, which were made under *policy*."""
    graphs = [graph for program in programs for graph in planned(program)]
    return Plan(torch.__version__, policy.to_json(), tuple(dict.fromkeys(graphs)))


def planned(program: Program) -> tuple[PlannedGraph, ...]:
    """The graphs of *program* as a plan has them."""
    return tuple(_graph(module, program) for module in program.modules())


def compare_with_plan(policy: Policy, program: Program, path: str) -> tuple[str, ...]:
    """How the graphs of *program* differ from the plan that *policy* comes from; warns if they do.

    Args:
        policy: A policy; if it comes from no plan there is nothing to differ from.
        program: What was captured of a module.
        path: Dotted path of the module, ``""`` for the model itself.
    """
    plan = policy.plan
    if plan is None:
        return ()
    found: tuple[str, ...] = ()
    for graph in planned(program):
        differences = plan.differences(graph)
        found += differences
        if differences:
            warnings.warn(
                f"{path or 'the model'} gets another graph than in the plan, of torch {plan.torch}"
                " (- planned, + now):\n" + "\n".join(differences),
                PlanWarning,
                stacklevel=5,
            )
    return found


def _graph(module: GraphModule, program: Program) -> PlannedGraph:
    names: dict[str, str] = {}

    def numbered(match: re.Match[str]) -> str:
        return names.setdefault(match[0], f"s{len(names)}")

    def canonical(text: str) -> str:
        return _SYMBOL.sub(numbered, text)

    text = canonical(show(module))
    inputs = module.graph.find_nodes(op="placeholder")
    calls = [node for node in module.graph.nodes if node.op == "call_function" and node.meta.get("fact")]
    return PlannedGraph(
        training=program.training,
        grad=program.grad,
        inputs=tuple(canonical(str(node.meta["fact"])) for node in inputs if node.meta.get("fact")),
        hash=hashlib.sha256(text.encode()).hexdigest(),
        operators=tuple(_operator(node) for node in calls if operator_name(node.target) != "getitem"),
    )


def _operator(node: Node) -> PlannedOperator:
    where, decision = node.meta.get("where"), node.meta.get("decision")
    target = node.args[1] if node.target is run_in_region else node.target
    dtypes = [text for value in node.all_input_nodes for text in dtype_names(value.meta.get("fact"))]
    rule = "" if decision is None else str(decision)
    return PlannedOperator(
        module=where.module if where else "",
        op=operator_name(target),
        dtypes=f"{', '.join(dtypes)} -> {', '.join(dtype_names(node.meta['fact']))}",
        rule="cast" if "inserted" in node.meta else rule,
    )
