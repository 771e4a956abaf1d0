"""Write the casts that eager autocast would make, each where eager autocast would make it.

Before: decisions are made, and no cast of autocast is in the graph.
After:  every argument has the dtype that its operator's decision asks for.

Where a cast stands decides in which order gradients are added up, so the places are eager's own:

* right before its consumer, the last argument first (GCC evaluates the arguments of the C++ wrapper from
  right to left; the elements of one list go from left to right);
* anew for every use of an activation;
* once for a float32 leaf that requires grad (eager's weight cache), at its first use, and with gradients
  recorded even inside ``no_grad`` (torch pull request 165068); ``matmul`` picks its kernel by whether its
  second argument requires grad.  Where no user of the leaf records gradients or looks at that, they are not
  recorded.  The key is the tensor alone: a region of another dtype inside gets the cast of the outer one, and
  mostly fails on it, as in eager.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fxamp.capture.recorder import set_grad_enabled
from fxamp.ir.facts import Fact, fact_of_node
from fxamp.ir.operators import TO_DTYPE, arguments_in_order, operator_name, set_argument
from fxamp.passes.base import Pass
from fxamp.passes.classify import Decision, castable, has_dtype_argument
from fxamp.passes.loop_arguments import values_given_cast
from fxamp.policy import CastPolicy, Policy
from fxamp.policy.passive import ONLY_INPUT
from fxamp.policy.table import REDISPATCHES

__all__ = ["InsertCasts"]

_TENSORS = ("Tensor", "Optional[Tensor]", "List[Tensor]")
# Their implementations ask whether an argument requires grad only while gradients are recorded, if at all
# (aten/src/ATen/native/Convolution.cpp); ``matmul`` always does (``should_fold`` in LinearAlgebra.cpp).
_BLIND_TO_GRADIENTS = frozenset(
    f"aten::{name}" for name in ("mm", "addmm", "conv1d", "conv2d", "conv3d", "convolution", "_convolution")
)
_CASTING = (CastPolicy.LOWER_PRECISION_FP, CastPolicy.FP32, CastPolicy.PROMOTE)


@dataclass(frozen=True)
class InsertCasts(Pass):
    """Every decision is carried out.

    Attributes:
        policy: Which tensors may be cast.
    """

    name: ClassVar[str] = "insert-casts"
    policy: Policy

    def run(self, graph: Graph) -> bool:
        kept: dict[Node, Node] = {}
        changed = False
        for node in list(graph.nodes):
            decision = node.meta.get("decision")
            if decision is None or node.meta.get("carried_out"):
                continue
            node.meta["carried_out"] = True
            writer = _Writer(graph, node, decision, self.policy, kept)
            changed |= writer.carry_out()
        return changed


@dataclass
class _Writer:
    graph: Graph
    node: Node
    decision: Decision
    policy: Policy
    kept: dict[Node, Node]

    def carry_out(self) -> bool:
        cast = self.decision.rule.cast
        if cast is CastPolicy.FP32_SET_OPT_DTYPE:
            return self._set_dtype()
        if cast is CastPolicy.FP32_APPEND_DTYPE:
            return self._append_dtype()
        changed = self._cast_arguments() if cast in _CASTING else False
        return self._cast_results() or changed

    def _set_dtype(self) -> bool:
        if has_dtype_argument(self.node) or not castable(fact_of_node(self.node.args[0]), self.policy):
            return False
        set_argument(self.node, "dtype", torch.float32)
        return True

    def _append_dtype(self) -> bool:
        fact = fact_of_node(self.node.args[0])
        if fact is None or not isinstance(self.node.target, OpOverload):
            return False
        overload = REDISPATCHES[self.node.target.name()].split(".")[-1]
        values = [value for _, value in arguments_in_order(self.node)]
        defaults = self.node.target._schema.arguments[len(values) :]
        self.node.args = (*values, *(argument.default_value for argument in defaults))
        self.node.target = getattr(self.node.target.overloadpacket, overload)
        self.node.kwargs = {"dtype": torch.float32 if castable(fact, self.policy) else fact.dtype}
        return True

    def _cast_arguments(self) -> bool:
        if "whole" in self.node.meta:
            return self._cast_before_loop()
        assert isinstance(self.node.target, OpOverload)
        changed = False
        for index, (argument, value) in reversed(list(enumerate(arguments_in_order(self.node)))):
            if str(argument.type) not in _TENSORS or (index and self.node.target.name() in ONLY_INPUT):
                continue
            cast = map_arg(value, self._cast)  # the elements of a list go from left to right
            if cast is not value and cast != value:
                set_argument(self.node, argument.name, cast)
                changed = True
        return changed

    def _cast_before_loop(self) -> bool:
        casts = [(name, at, value, self._cast(value)) for name, at, value in values_given_cast(self.node)]
        values = {argument.name: value for argument, value in arguments_in_order(self.node)}
        for name, place, _, cast in casts:
            given = values[name]
            values[name] = [*given[:place], cast, *given[place + 1 :]] if isinstance(given, list) else cast
            set_argument(self.node, name, values[name])
        return any(cast is not value for _, _, value, cast in casts)

    def _cast(self, value: Node) -> Node:
        fact, target = fact_of_node(value), self.decision.target
        assert target is not None
        if fact is None or not castable(fact, self.policy) or fact.dtype is target:
            return value
        is_kept = fact.leaf and fact.dtype is torch.float32 and self.node.meta["region"].cache
        is_custom = operator_name(self.node.target).partition("::")[0] != "aten"  # cast by torch.library
        if not is_kept or is_custom or target is not self.decision.low:
            return self._write(value, target, grad=self.node.meta["grad"])
        if value not in self.kept:
            grad = any(user.meta.get("grad") or _looks_at_gradients(user) for user in value.users)
            self.kept[value] = self._write(value, target, grad=grad)
            self.kept[value].meta["kept"] = True
        return self.kept[value]

    def _cast_results(self) -> bool:
        """Cast float32 results, whose recorded facts are those of the casts."""
        target = self.decision.returns
        if target is None:
            return False
        facts = self.node.meta["fact"]
        if not isinstance(facts, tuple):
            return self._cast_result(self.node, target)
        items = [user for user in self.node.users if user.target is operator.getitem]
        changed = [self._cast_result(item, target) for item in items]
        self.node.meta["fact"] = tuple(self._before_cast(fact, target) for fact in facts)
        return any(changed)

    def _before_cast(self, fact: Fact | None, target: torch.dtype) -> Fact | None:
        is_cast = isinstance(fact, Fact) and castable(fact, self.policy) and fact.dtype is target
        return replace(fact, dtype=torch.float32) if is_cast and fact is not None else fact

    def _cast_result(self, result: Node, target: torch.dtype) -> bool:
        fact = fact_of_node(result)
        before = self._before_cast(fact, target)
        if before is fact:
            return False
        with self.graph.inserting_after(result):
            cast = self.graph.call_function(TO_DTYPE, (result, target))
        result.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
        cast.meta.update(
            {key: value for key, value in result.meta.items() if key not in ("decision", "ruling", "site")},
            inserted=self.decision,
        )
        result.meta["fact"] = before
        result.meta.pop("val", None)
        cast._rename(f"{result.name}_{target.abbr}")
        return True

    def _write(self, value: Node, target: torch.dtype, *, grad: bool) -> Node:
        with self._gradients(grad):
            cast = self.graph.call_function(TO_DTYPE, (value, target))
        fact = fact_of_node(value)
        assert fact is not None
        cast.meta.update(
            region=self.node.meta["region"],
            grad=grad,
            where=self.node.meta.get("where"),
            fact=fact.cast_to(target, grad=grad),
            inserted=self.decision,
        )
        cast._rename(f"{value.name}_{target.abbr}")
        return cast

    @contextmanager
    def _gradients(self, enabled: bool) -> Iterator[None]:  # noqa: FBT001
        """What is inserted inside stands before the node, where gradients are recorded or not."""
        if enabled == self.node.meta["grad"]:
            with self.graph.inserting_before(self.node):
                yield
            return
        back = self.node.prev
        if back.target is set_grad_enabled and "written" in back.meta:  # there is a switched place already
            with self.graph.inserting_before(back):
                yield
            return
        with self.graph.inserting_before(self.node):
            self._set_grad(enabled)
            yield
            self._set_grad(not enabled)

    def _set_grad(self, enabled: bool) -> None:  # noqa: FBT001
        node = self.graph.call_function(set_grad_enabled, (enabled,))
        node.meta.update(region=self.node.meta["region"], grad=enabled, fact=None, written=True)


def _looks_at_gradients(node: Node) -> bool:
    """Whether what *node* does may hang on which of its arguments require grad, where none is recorded."""
    name = operator_name(node.target)
    if name == "aten::linear":  # of more than two dimensions it may be a matmul
        fact = fact_of_node(node.args[0])
        return fact is None or len(fact.shape) > _MATRIX
    return name not in _BLIND_TO_GRADIENTS


_MATRIX = 2
