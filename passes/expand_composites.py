"""Open the composite operators that hide operators with a rule, just far enough for those to show.

Before: an operator without a rule, written in C++ in other operators (``einsum``, ``lstm``), is one node.
After:  where autocast would cast inside it, its body stands in its place; all other composites stay whole,
        and loops over time that were recorded whole do (``fxamp/policy/time_loops.py``).

The body is recorded from the C++ implementation itself, in the node's own region, so what it does with
dtypes inside is the dispatcher's answer, as for the rest of the graph.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import sympy
import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate, map_arg

from fxamp.capture.capture import recording
from fxamp.capture.composite_bodies import call_body
from fxamp.capture.recorder import Recorder
from fxamp.errors import PolicyError
from fxamp.ir.operators import is_composite
from fxamp.passes.base import Pass
from fxamp.passes.classify import would_cast
from fxamp.passes.flatten_regions import FlattenRegions
from fxamp.passes.propagate_dtypes import fresh_fake
from fxamp.policy import Policy
from fxamp.policy.override import NO_OVERRIDE
from fxamp.policy.reentrant import REENTRANT
from fxamp.policy.scopes import PlacedPolicy

__all__ = ["ExpandComposites"]

# Their C++ code picks an implementation by the kind of tensor (oneDNN or not), and a fake tensor is of
# another kind; so the body is recorded on real tensors of the example's sizes, which become guards.
_BY_BACKEND = frozenset(
    {"aten::lstm.input", "aten::gru.input", "aten::rnn_tanh.input", "aten::rnn_relu.input"}
)


@dataclass(frozen=True)
class ExpandComposites(Pass):
    """No composite operator in an enabled region hides an operator that autocast would cast for.

    Attributes:
        policy: Whose rules.
        fakes: The mode of the fake tensors in the graph.
        placed: The policy on the model, if it is not torch's own.
    """

    name: ClassVar[str] = "expand-composites"
    policy: Policy
    fakes: FakeTensorMode
    placed: PlacedPolicy | None = None

    def run(self, graph: Graph) -> bool:
        known: _Known = {}
        return self._expand_all(graph, known)

    def _expand_all(self, graph: Graph, known: _Known) -> bool:
        sizes: dict[sympy.Symbol, Node] = {}  # those that were read before the node
        changed = False
        for node in list(graph.nodes):
            changed |= self._expand(graph, node, known, sizes)
            if "symbol" in node.meta:
                sizes.setdefault(node.meta["symbol"], node)
        return changed

    def _expand(self, graph: Graph, node: Node, known: _Known, sizes: dict[sympy.Symbol, Node]) -> bool:
        if not self._may_hide_rules(node):
            return False
        key = _call_key(node)
        found = known.get(key)
        if key not in known or (found is not None and not set(found.sizes.values()) <= sizes.keys()):
            body = self._body(node, sizes)
            if body is None:  # what is inside stays unknown, so autocast itself must decide when it runs
                node.meta["keep_region"] = True
                return True
            found = known[key] = body if self._open(body.graph, known) else None
        if found is None:
            return False
        for inner in found.splice(graph, node, sizes):
            if "symbol" in inner.meta:
                sizes.setdefault(inner.meta["symbol"], inner)
        return True

    def _body(self, node: Node, sizes: dict[sympy.Symbol, Node]) -> _Body | None:
        assert isinstance(node.target, OpOverload)
        for concrete in (True,) if node.target.name() in _BY_BACKEND else (False, True):
            try:
                return _Body.record(node, self.fakes, sizes, self.placed, concrete=concrete)
            except PolicyError:
                raise
            except Exception:  # noqa: BLE001  whatever C++ code raises on tensors without values
                continue
        return None

    def _open(self, graph: Graph, known: _Known) -> bool:
        """Expand inside the body too; say whether anything in it gets cast."""
        expanded = self._expand_all(graph, known)
        casting = [would_cast(inner, self.policy) for inner in graph.nodes]
        operators = [inner.target for inner in graph.nodes if isinstance(inner.target, OpOverload)]
        kept = [operator.name() in REENTRANT for operator in operators]
        return expanded or any(casting) or any(kept)

    def _may_hide_rules(self, node: Node) -> bool:
        target = node.target
        return (
            node.op == "call_function"
            and isinstance(target, OpOverload)
            and node.meta["fact"] is not None
            and bool(node.meta["region"].enabled or self.policy.overrides)
            and is_composite(target)
            and (node.meta.get("ruling") or NO_OVERRIDE).won is None
            and (self.policy.rule(target) is None or not node.meta["region"].enabled)
            and target.name() not in REENTRANT
            and "whole" not in node.meta
        )


def _call_key(node: Node) -> Any:
    """Calls with equal keys run through the same body."""
    places: dict[Node, int] = {}

    def describe(arg: Node) -> str:
        value = arg.meta.get("val", arg.meta.get("number"))
        text = f"{places.setdefault(arg, len(places))} {arg.meta.get('fact')!r}"
        if not isinstance(value, torch.Tensor):
            return f"{text} {value}"
        strided = value.layout is torch.strided
        return f"{text} {(value.stride(), value.storage_offset()) if strided else arg.name}"

    arguments = map_arg((node.args, node.kwargs), describe)
    return (node.target, node.meta["region"], node.meta["grad"], node.meta.get("site"), repr(arguments))


@dataclass
class _Body:
    """The recorded implementation of a composite call.

    Attributes:
        graph: What it calls.
        tensors: Its inputs, in the order in which they first occur among the call's arguments.
        sizes: Those of its inputs that are sizes.
    """

    graph: Graph
    tensors: list[Node]
    sizes: dict[Node, sympy.Symbol]

    @staticmethod
    def record(
        node: Node,
        fakes: FakeTensorMode,
        sizes: dict[sympy.Symbol, Node],
        placed: PlacedPolicy | None,
        *,
        concrete: bool,
    ) -> _Body:
        assert isinstance(node.target, OpOverload)
        recorder = Recorder(
            fakes,
            node.meta["region"],
            lambda tensor: None,
            concrete=concrete,
            placed=placed,
            site=node.meta.get("site"),
        )
        recorder.grad_at_entry = recorder.grad = node.meta["grad"]
        tensors: list[Node] = []
        values: dict[Node, Any] = {}
        seen: set[int] = set()

        def value_of(arg: Node) -> Any:
            if arg not in values:
                value: Any = arg.meta.get("val", arg.meta.get("number"))
                if isinstance(value, torch.Tensor):
                    if id(value) in seen:  # nodes of two copies of one body share it
                        value = fresh_fake(arg, sized=False)
                    seen.add(id(value))
                    value = _concrete(value) if concrete else value
                    tensors.append(recorder.add_input(value, arg.name))
                values[arg] = value
            return values[arg]

        args, kwargs = map_arg((node.args, node.kwargs), value_of)
        inner_sizes = _share_sizes(recorder, sizes)
        if concrete:
            args, kwargs = map_aggregate((args, kwargs), _number)
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(node.meta["grad"]))
            stack.enter_context(torch.random.fork_rng(devices=[], enabled=concrete))
            stack.enter_context(recording(recorder, node.meta["region"]))
            result = call_body(node.target, args, kwargs)
            recorder.finish(list(result) if isinstance(result, (tuple, list)) else [result])
        FlattenRegions(node.meta["region"], node.meta["grad"]).run(recorder.graph)
        used = {inner: symbol for inner, symbol in inner_sizes.items() if inner.users}
        return _Body(recorder.graph, tensors, used)

    def splice(self, graph: Graph, node: Node, sizes: dict[sympy.Symbol, Node]) -> list[Node]:
        """Put the body in *node*'s place; give its nodes there."""
        copied = {inner: sizes[symbol] for inner, symbol in self.sizes.items()}
        copied.update(zip(self.tensors, _tensors_in_order(node), strict=True))
        outputs: Any = ()
        for inner in self.graph.nodes:
            if inner.op == "placeholder":
                continue
            if inner.op == "output":
                outputs = map_arg(inner.args[0], lambda n: copied[n])
                break
            with graph.inserting_before(node):
                copied[inner] = graph.node_copy(inner, lambda n: copied[n])
            copied[inner].meta["where"] = node.meta.get("where")
            copied[inner].meta.setdefault("inside", node.target)
        _replace(graph, node, outputs)
        return [copy for inner, copy in copied.items() if inner.op != "placeholder"]


_Known = dict[Any, "_Body | None"]
"""What calls look like inside, by key; ``None`` where nothing inside gets cast."""


def _tensors_in_order(node: Node) -> list[Node]:
    found: dict[Node, None] = {}
    map_arg((node.args, node.kwargs), found.setdefault)
    return [arg for arg in found if isinstance(arg.meta.get("val", arg.meta.get("number")), torch.Tensor)]


def _share_sizes(recorder: Recorder, sizes: dict[sympy.Symbol, Node]) -> dict[Node, sympy.Symbol]:
    """Let the body use the *sizes* that the graph around it has read; give its inputs for them."""
    inner_sizes = {}
    for symbol, node in sizes.items():
        if symbol not in recorder.sizes.symbols:
            inner = recorder.graph.placeholder(node.name)
            inner.meta["fact"] = None
            recorder.sizes.symbols[symbol] = inner
            inner_sizes[inner] = symbol
    return inner_sizes


def _replace(graph: Graph, node: Node, outputs: Any) -> None:
    if not isinstance(node.meta["fact"], tuple):
        node.replace_all_uses_with(outputs[0])
        graph.erase_node(node)
        return
    for user in list(node.users):  # getitem nodes: several results are always taken apart
        item = outputs[user.args[1]]
        _replace(graph, user, item if isinstance(item, (list, tuple)) else [item])
    graph.erase_node(node)


def _concrete(fake: torch.Tensor) -> torch.Tensor:
    """A real tensor of zeros like *fake*, of the example's sizes."""
    shape = [int(size) for size in fake.shape]
    real = torch.zeros(shape, dtype=fake.dtype, device=fake.device)
    return real.requires_grad_(fake.requires_grad)


def _number(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        return int(value)
    return value
