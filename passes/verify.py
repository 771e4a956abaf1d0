"""Check a rewritten graph against the dispatcher's own answers.

The passes decide from the policy table; the recorder asked the real dispatcher, or for a policy that is not
torch's own the wrapper of ``policy_dispatch``.  Here both meet: the graph is run on fake tensors with
autocast off, and every node that was captured must give the dtype that was recorded.  The invariants:

``well-formed``     ``graph.lint()`` accepts the graph
``flat``            no mark of a region is left
``obeyed``          no operator would still be cast
``same dtype``      every captured node gives the dtype recorded under eager autocast
``same gradient``   and takes part in the gradient where it did
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node

from fxamp.errors import CaptureError, InvariantError
from fxamp.ir.facts import Fact, Facts
from fxamp.ir.regions import enter_region
from fxamp.ir.where import locate
from fxamp.passes.base import Pass
from fxamp.passes.classify import would_cast
from fxamp.passes.propagate_dtypes import facts_on_fakes
from fxamp.policy import CastPolicy, Policy

__all__ = ["Verify"]

_CAST = (CastPolicy.LOWER_PRECISION_FP, CastPolicy.FP32)


@dataclass(frozen=True)
class Verify(Pass):
    """Changes nothing; raises where an invariant does not hold.

    Attributes:
        policy: The rules that the graph must obey.
        fakes: The mode of the fake tensors in the graph.

    Raises:
        InvariantError: A pass is at fault.
        CaptureError: The recorded graph has another gradient history than the model.
    """

    name: ClassVar[str] = "verify"
    policy: Policy
    fakes: FakeTensorMode

    def run(self, graph: Graph) -> bool:
        graph.lint()
        for node in graph.nodes:
            if node.target is enter_region:
                raise InvariantError(f"flat: the mark of a region is left, {locate(node)}")
            decision = node.meta.get("decision")
            if decision is not None and decision.rule.cast in _CAST and would_cast(node, self.policy):
                raise InvariantError(
                    f"obeyed: {locate(node)} still has an argument to cast to {decision.target}"
                )
        facts_on_fakes(graph, self.fakes, _compare)
        return False


def _compare(node: Node, found: Facts) -> None:
    _compare_facts(node, node.meta.get("fact"), found)


def _compare_facts(node: Node, recorded: object, found: object) -> None:
    if isinstance(recorded, tuple) and isinstance(found, tuple):
        for one, other in zip(recorded, found, strict=True):
            _compare_facts(node, one, other)
        return
    if not isinstance(recorded, Fact) or not isinstance(found, Fact):
        return
    if recorded.dtype is not found.dtype:
        raise InvariantError(
            f"same dtype: {locate(node)} gives {found.dtype} without autocast, "
            f"and {recorded.dtype} under eager autocast"
        )
    if recorded.requires_grad != found.requires_grad:
        raise CaptureError(
            f"the gradient history of {locate(node)} was changed out of the recorder's sight: "
            f"requires_grad is {recorded.requires_grad} in eager and {found.requires_grad} in the graph"
        )
