"""Record the parts of a call that are one node: what runs under a checkpoint, custom autograd functions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import detach_variable

from fxamp.capture.graph_writer import _OF_ONE_GRAPH, GraphWriter
from fxamp.capture.policy_dispatch import PolicyRegion
from fxamp.capture.segments import (
    Block,
    Outer,
)
from fxamp.errors import CaptureError
from fxamp.ir.blocks import Checkpointed, CustomFunction
from fxamp.ir.facts import fact_of
from fxamp.ir.regions import RealRegion, observe_region
from fxamp.ir.where import where_now

__all__ = ["BlockRecorder"]


class BlockRecorder(GraphWriter):
    """A graph writer that can put a part of the call into a graph of its own."""

    # --- blocks -------------------------------------------------------------------------------------

    def enter_block(self, inputs: Iterable[tuple[torch.Tensor, torch.Tensor]] = ()) -> None:
        """What is recorded from here on goes into a graph of its own.

        Args:
            inputs: Tensors of the block that stand for tensors outside.
        """
        self._hold_latest()
        pairs = [(inner, self._node_of_tensor(outer)) for inner, outer in inputs]
        self._outside.append({name: vars(self)[name] for name in _OF_ONE_GRAPH})
        first = self._outside[0]
        self._region, self.grad = first["_region_at_entry"], self.grad_at_entry
        self._open()
        for inner, node in pairs:
            self._lift_tensor(node.name, inner, Outer(node), inner)

    def abandon_block(self) -> None:
        """Forget the block."""
        vars(self).update(self._outside.pop())

    def leave_block(self, outputs: list[torch.Tensor] | None) -> Block:
        """End the block; without *outputs* they are the tensors that Python still uses."""
        self._hold_latest()
        if outputs is None:
            positions = {position for position, _ in self._positions_of_outputs(set())}
            outputs = [t for t in self._alive if self._positions.get(id(t)) in positions]
            outputs = list({id(tensor): tensor for tensor in outputs}.values())
        self.finish(list(outputs))
        with self.unnoted():
            module = _LazyGraphModule(dict(self.blocks), self.graph, "Block")
        block = Block(
            module,
            tuple(origin.node for origin in self.origins if isinstance(origin, Outer)),
            tuple(outputs),
        )
        self.abandon_block()
        return block

    def add_blocks(
        self,
        first: Block,
        again: Block,
        options: dict[str, Any],
        operands: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> None:
        """Record a checkpoint of *first*, whose *outputs* go on; *again* is how it runs once more."""
        where = where_now(self.modules[-1])
        self._observe_modes()
        given = [self._node_of_tensor(operand) for operand in operands]
        own = [node for block in (first, again) for node in block.inputs if node not in given]
        closure = list(dict.fromkeys(own))
        places = {node: place for place, node in reversed(list(enumerate((*given, *closure))))}
        inputs = [tuple(places[node] for node in block.inputs) for block in (first, again)]
        graphs = [self._add_graph(block.module) for block in (first, again)]
        target = Checkpointed(inputs[0], inputs[1], tuple(options.items()))
        node = self.graph.call_function(target, (*graphs, tuple(given), tuple(closure)))
        node.meta.update(where=where, fact=fact_of(list(outputs)), val=list(outputs))
        self._track_items(None, node, list(outputs))

    def _add_graph(self, module: GraphModule) -> Node:
        known = [name for name, other in self.blocks.items() if other is module]
        name = known[0] if known else f"block_{len(self.blocks)}"
        self.blocks[name] = module
        node = self.graph.get_attr(name)
        node.meta.update(fact=None, block=True)
        return node

    def detached(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """*tensors* as a reentrant checkpoint runs its function on them again."""
        with _disable_current_modes(), self.fakes, torch.enable_grad():
            return list(detach_variable(tuple(self._fake_tensor(tensor) for tensor in tensors)))

    def like_results(self, tensors: Sequence[torch.Tensor], *, needs_grad: bool) -> list[torch.Tensor]:
        """New tensors like *tensors*, as an ``autograd.Function`` gives them."""
        with _disable_current_modes(), self.fakes, torch.enable_grad():
            plain = [tensor.detach() for tensor in tensors]
            return [
                tensor.requires_grad_().clone() if needs_grad and tensor.is_floating_point() else tensor
                for tensor in plain
            ]

    # --- custom functions ---------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether anything is being recorded: not inside of a node."""
        return not self._inside

    @contextmanager
    def closed(self) -> Iterator[None]:
        """What the real call does inside is no matter of the recording."""
        self._inside, before = True, self._inside
        try:
            yield
        finally:
            self._inside = before

    def record_function(
        self,
        function: CustomFunction,
        plain: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Record a call of *function*, which *plain* does; give its fake results."""
        self._hold_latest()
        where = where_now(self.modules[-1])
        self._states.check_context()
        self._observe_modes()
        nodes: Any = map_aggregate((args, kwargs), self._argument)
        self._inside = True
        try:
            with _disable_current_modes(), self.fakes, function.region.context():
                result = plain(*self._fake(args), **self._fake(kwargs))
        except Exception as error:
            self.refuse(CaptureError(f"{function.__name__} does not run on fake tensors: {error}"))
            raise
        finally:
            self._inside = False
        node = self.graph.create_node("call_function", function, nodes[0], nodes[1], name=function.__name__)
        node.meta["where"] = where
        self._annotate(node, result)
        self._states.allow(result)
        return self._track_function(node, result)

    def region_now(self) -> RealRegion:
        """The state of autocast, to run a custom function in."""
        region = observe_region(self.region.device_type)
        if self.by is None:
            return region
        return PolicyRegion(region, self.by.placed, tuple(self.modules), self.scopes_now())

    def _track_function(self, node: Node, result: Any) -> Any:
        if isinstance(result, torch.Tensor):
            self._track(result, node)
            return result
        for index, item in enumerate(result if isinstance(result, tuple) else ()):
            if isinstance(item, torch.Tensor):
                part = self.graph.call_function(operator.getitem, (node, index))
                part.meta["where"] = node.meta["where"]
                self._annotate(part, item)
                self._track(item, part)
        return result
