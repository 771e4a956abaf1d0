"""Decide for every operator what autocast does to its arguments.

Before: nodes have facts and regions.
After:  ``node.meta["decision"]`` says which rule applies and to which dtype arguments are cast; nodes
        that autocast leaves alone have none.  Promoting operators are decided by ``resolve-promotes``.

The rule for a tensor (ATen/autocast_mode.h, ``is_eligible`` and ``cached_cast``): it is cast if it lives on
the policy's device type, is floating and is not float64.  Integers, complex, other devices: never.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.node import Argument

from fxamp.capture.policy_dispatch import low_dtype, rule_for
from fxamp.errors import PolicyError
from fxamp.ir.facts import Fact, fact_of_node
from fxamp.ir.operators import arguments_in_order, tensor_arguments
from fxamp.ir.where import locate
from fxamp.passes.base import Pass
from fxamp.passes.loop_arguments import values_given_cast
from fxamp.policy import CastPolicy, OpRule, Policy
from fxamp.policy.override import NO_OVERRIDE, Ruling, Verb
from fxamp.policy.passive import ONLY_INPUT
from fxamp.policy.time_loops import TIME_LOOPS

__all__ = ["Classify", "Decision", "castable", "decide", "would_cast"]


@dataclass(frozen=True)
class Decision:
    """What autocast does to one operator.

    Attributes:
        rule: The row of the table that says so, or what stands for it in an override.
        target: The dtype its arguments are cast to, or computed in; ``None`` until promotion is resolved.
        low: The low precision dtype there.
        ruling: The override that decided, if one did, and those that it overruled.
        returns: The dtype that float32 results are cast to; ``None`` leaves them.
    """

    rule: OpRule
    target: torch.dtype | None
    low: torch.dtype
    ruling: Ruling = NO_OVERRIDE
    returns: torch.dtype | None = None

    def __str__(self) -> str:
        return f"{self.rule.cast.value}: {self.rule.why}"


@dataclass(frozen=True)
class Classify(Pass):
    """Every node that a rule of the policy applies to has its decision."""

    name: ClassVar[str] = "classify"
    policy: Policy

    def run(self, graph: Graph) -> bool:
        changed = False
        for node in graph.nodes:
            if "decision" in node.meta:
                continue
            decision = decide(node, self.policy)
            if decision is not None:
                node.meta["decision"] = decision
                changed = True
        return changed


def decide(node: Node, policy: Policy) -> Decision | None:
    """The decision for *node* under *policy*; ``None`` where autocast leaves it alone.

    Raises:
        PolicyError: The operator is banned under autocast; has eager's text and the source line.
    """
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    region, ruling = node.meta["region"], node.meta.get("ruling") or NO_OVERRIDE
    if "whole" in node.meta:
        rule = TIME_LOOPS[node.target.name()] if region.enabled else None
    else:
        rule = rule_for(node.target, ruling, region, policy)
    if rule is None:
        return None
    low = low_dtype(region, policy)
    returns = low if ruling.won is not None and ruling.won.verb is Verb.FLOAT32_TO_LOW else None
    if rule.cast is CastPolicy.BANNED:
        raise PolicyError(f"{node.target.name()} is unsafe to autocast, at {locate(node)}: {rule.why}")
    if rule.cast is CastPolicy.LOWER_PRECISION_FP:
        return Decision(rule, low, low, ruling)
    if rule.cast is CastPolicy.PROMOTE:
        return Decision(rule, None, low, ruling)
    return Decision(rule, torch.float32, low, ruling, returns)


def castable(fact: Fact | None, policy: Policy) -> bool:
    """Whether autocast may cast a tensor of this *fact*."""
    return (
        fact is not None
        and fact.device.type == policy.device_type
        and fact.dtype.is_floating_point
        and fact.dtype is not torch.float64
    )


def would_cast(node: Node, policy: Policy) -> bool:
    """Whether the operator of *node* has a rule and a tensor that the rule looks at, no cast that is kept."""
    decision = decide(node, policy)
    if decision is None:
        return False
    if decision.rule.cast is CastPolicy.FP32_SET_OPT_DTYPE:
        return not has_dtype_argument(node) and castable(fact_of_node(node.args[0]), policy)
    items = [item for value in cast_values(node) for item in _items(value)]
    facts = [fact_of_node(item) for item in items if not (isinstance(item, Node) and "kept" in item.meta)]
    if decision.target is None or decision.rule.cast is CastPolicy.FP32_APPEND_DTYPE:
        return any(castable(fact, policy) for fact in facts)
    return any(castable(fact, policy) and fact.dtype is not decision.target for fact in facts if fact)


def cast_values(node: Node) -> list[Argument]:
    """The arguments of *node* that a decision to cast is about."""
    assert isinstance(node.target, OpOverload)
    if "whole" in node.meta:
        return [value for _, _, value in values_given_cast(node)]
    values = list(tensor_arguments(node))
    return values[:1] if node.target.name() in ONLY_INPUT else values


def has_dtype_argument(node: Node) -> bool:
    """Whether the call of *node* gives its ``dtype=``."""
    return any(argument.name == "dtype" and value is not None for argument, value in arguments_in_order(node))


def _items(value: object) -> list[object]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
