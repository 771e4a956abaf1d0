"""An override that means no call of the model is a mistake, and is said to be one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch._ops import OpOverload
from torch.fx import GraphModule

from fxamp.errors import PolicyError
from fxamp.ir.operators import operator_name
from fxamp.policy.near import near_matches
from fxamp.policy.override import Override

__all__ = ["check_overrides"]


def check_overrides(
    overrides: Sequence[Override], meant: frozenset[int], modules: Sequence[GraphModule]
) -> None:
    """Check that each of *overrides* means something.

    Args:
        overrides: Those of a policy.
        meant: The places of those that have found a call that they mean.
        modules: The graphs of the model, for what the user may have meant.

    Raises:
        PolicyError: One has not, and is not optional.
    """
    for place, override in enumerate(overrides):
        if place not in meant and not override.optional:
            raise PolicyError(
                f"no operator that the model calls is meant by  {override}{_near(override, modules)}\n"
                "  inside an operator that is itself cast, others are not seen; optional=True allows for none"
            )


def _near(override: Override, modules: Sequence[GraphModule]) -> str:
    nodes = [node for module in modules for node in module.graph.nodes if isinstance(node.target, OpOverload)]
    if override.selector.op:
        return near_matches(override.selector.op, [operator_name(node.target) for node in nodes])
    places = [node.meta["where"] for node in nodes if node.meta.get("where")]
    return near_matches(override.selector.where, [f"{Path(at.file).name}:{at.line}" for at in places])
