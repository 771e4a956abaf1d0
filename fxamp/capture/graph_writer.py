"""Write one graph: a node for each fake tensor, an input or a source for each one from outside."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import sympy
import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
)
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate
from torch.utils.weak import TensorWeakRef

from fxamp.capture.attribute_reads import Read
from fxamp.capture.guards import Extent, Opening
from fxamp.capture.pause import Pause
from fxamp.capture.plain_fakes import fake_like
from fxamp.capture.policy_dispatch import PolicyDispatch, inputs_of, site_of
from fxamp.capture.refused_states import RefusedStates
from fxamp.capture.segments import (
    Captured,
    Carried,
    Number,
    Origin,
    Outer,
    Value,
    are_held,
)
from fxamp.capture.sources import Constant, Source
from fxamp.capture.symbols import SizeNodes
from fxamp.errors import CaptureError
from fxamp.ir.facts import fact_of, is_cacheable_leaf
from fxamp.ir.operators import is_inplace, operator_name
from fxamp.ir.regions import Region, enter_region, observe_region
from fxamp.ir.rounded_weight import RoundedWeight
from fxamp.ir.where import where_now
from fxamp.policy.scopes import PlacedPolicy
from fxamp.policy.site import Site

__all__ = ["GraphWriter", "set_grad_enabled"]

set_grad_enabled = torch._C._set_grad_enabled
# What a recorder holds of one graph; a block has its own for as long as it is recorded.
_OF_ONE_GRAPH = (
    "graph",
    "sizes",
    "sources",
    "origins",
    "blocks",
    "grad",
    "_region",
    "_region_at_entry",
    "_nodes",
    "_alive",
    "_positions",
    "_order",
    "_latest",
)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_TENSOR_CLASSES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, RoundedWeight)


def _is_fake(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, FakeTensor)


class GraphWriter:
    """Writes one graph.

    Args:
        fakes: The mode that the fake tensors live in.
        region: The state of autocast at the start of the call.
        find: Where a real tensor comes from, by identity; ``None`` makes it a constant.
        concrete: Whether the operators run on real tensors (the body of a composite operator that picks
            its implementation by the kind of tensor), instead of on fakes of them.
        pause: Where real values are to be had when fake tensors do not do; without it such a call is refused.
        placed: The policy that operators are called under, if it is not torch's own.
        site: Where all of them are called (the body of a composite operator).
        whole_loops: Whether an operator that loops over time stays one node (``policy/time_loops.py``).

    Attributes:
        graph: What has been recorded of the present segment.
        sources: The origin of each ``get_attr`` node in it.
        origins: What each of its inputs is.
        modules: The module paths that are being called, innermost last.
        unnoted: Makes a context for reads that are not the model's.
        by: Calls operators under that policy.
        scopes: By module path, which of its overrides select the module.
        new_reads: Gives the attributes of modules that Python has read since it was asked before.
    """

    def __init__(
        self,
        fakes: FakeTensorMode,
        region: Region,
        find: Callable[[torch.Tensor], Source | None],
        *,
        concrete: bool = False,
        pause: Pause | None = None,
        placed: PlacedPolicy | None = None,
        site: Site | None = None,
        whole_loops: bool = False,
    ) -> None:
        self.fakes, self.region, self._find, self.concrete = fakes, region, find, concrete
        self._region, self._low = region, region.dtype
        self._pause, self._site = pause, site
        self.whole_loops = whole_loops
        self.by = PolicyDispatch(placed, self._here) if placed is not None else None
        self.scopes: Mapping[str, frozenset[int]] = {}
        self._carried = Carried()
        self.unnoted: Callable[[], AbstractContextManager[object]] = nullcontext
        self.new_reads: Callable[[], tuple[Read, ...]] = tuple
        self.opening = Opening(())
        self.modules: list[str] = [""]
        self.grad_at_entry = self.grad = torch.is_grad_enabled()
        self._states = RefusedStates()
        self._refusal: Exception | None = None
        self._latest: tuple[Node, int, TensorWeakRef] | None = None
        self._fake_of: dict[int, torch.Tensor] = {}
        self._real_of: dict[int, torch.Tensor] = {}
        self._outside: list[dict[str, Any]] = []
        self._inside = False
        self._open()

    def _open(self) -> None:
        """Begin a segment, or a block."""
        self.graph = Graph()
        self.sizes = SizeNodes(self.graph, self._lift_number)
        self.sources: dict[Node, Source] = {}
        self._constants = 0
        self.origins: list[Origin] = []
        self._region_at_entry = self._region
        self._nodes: dict[int, Node] = {}
        self._alive: list[Any] = []
        self._positions: dict[int, int] = {}
        self._order: list[Node] = []
        self.blocks: dict[str, GraphModule] = {}

    def refuse(self, error: Exception) -> None:
        """Remember why this call cannot be recorded, even if the user's code catches *error* and goes on."""
        self._refusal = self._refusal or error

    def raise_refusal(self) -> None:
        """Raise what was refused first, if anything was."""
        if self._refusal is not None:
            raise self._refusal

    # --- inputs and outputs -------------------------------------------------------------------------

    def add_input(self, fake: torch.Tensor, name: str) -> Node:
        """Make *fake* an input of the graph."""
        node = self.graph.placeholder(name)
        self.origins.append(Value(self._carried.count))
        self._carried.add(fake)
        self._annotate(node, fake)
        self._track(fake, node)
        self.sizes.add_sizes_of(node, fake)
        return node

    def begin_with(self, values: Sequence[object]) -> None:
        """Note that the present segment begins with *values*, from which sizes can be read."""
        env: Any = self.fakes.shape_env
        extents = tuple(map(Extent.of, values))
        self.opening = Opening(extents, self.opening.symbols, len(env.guards), len(env.outcomes))
        self._carried.symbols |= self.opening.numbers()

    def _lift_number(self, symbol: sympy.Symbol) -> Node | None:
        """An input for a size that an earlier segment, or the graph outside of the block, has read."""
        if self._outside:
            with self._stepped_out():
                node = self.sizes.node_of(symbol)
            return None if node is None else self._lift(str(symbol), Outer(node), node.meta.get("number"))
        number = self._carried.symbols.get(symbol)
        return None if number is None else self._lift(str(symbol), Number(symbol), number)

    def _lift(self, name: str, origin: Origin, number: object = None) -> Node:
        """A new input, behind those that there are."""
        place = next((node for node in self.graph.nodes if node.op != "placeholder"), None)
        with self.graph.inserting_before(place) if place is not None else nullcontext():
            node = self.graph.placeholder(name)
        node.meta["fact"] = None
        if number is not None:
            node.meta["number"] = number
        self.origins.append(origin)
        return node

    def node_of(self, value: object) -> object:
        """The node of a tensor or symbolic number; any other value as it is.

        Raises:
            CaptureError: The recorder did not see the tensor being made.
        """
        if isinstance(value, torch.Tensor):
            return self._node_of_tensor(value)
        if isinstance(value, _SYMBOLIC):
            return self.sizes.node_for(value)
        return value

    def finish(self, outputs: list[object]) -> None:
        """End the graph with *outputs*, in the gradient mode it began with."""
        self._hold_latest()
        nodes: Any = map_aggregate(cast("Any", outputs), self._argument)
        self._end(tuple(nodes))

    def _end(self, outputs: tuple[Any, ...]) -> None:
        self._observe_grad(self.grad_at_entry)
        self.graph.output(outputs)

    def segment(self) -> Captured:
        """The present segment, which has been finished."""
        env: Any = self.fakes.shape_env
        return Captured(
            graph=self.graph,
            region=self._region_at_entry,
            fakes=self.fakes,
            env=env,
            sources=self.sources,
            origins=tuple(self.origins),
            opening=self.opening,
            grad=self.grad_at_entry,
            reads=self.new_reads(),
            blocks=self.blocks,
            placed=self.by.placed if self.by is not None else None,
            meant=self.by.meant if self.by is not None else frozenset(),
            dtypes_read=tuple(self.by.dtypes_read) if self.by is not None else (),
        )

    def let_go(self, leaves: Sequence[torch.Tensor]) -> dict[Node, torch.Tensor]:
        """Hold no tensor any more; give the real ones that nodes stand for, *leaves* and sources."""
        self._hold_latest()
        reals = {self._nodes[id(t)]: t for t in self._alive if id(t) in self._nodes and not _is_fake(t)}
        inputs = self.graph.find_nodes(op="placeholder")
        for node, origin in zip(inputs, self.origins, strict=False):
            if isinstance(origin, Value) and origin.index < len(leaves):
                reals[node] = leaves[origin.index]
        self._alive, self._nodes, self._positions, self._order = [], {}, {}, []
        self._carried, self._outside = Carried(), []
        return reals

    @contextmanager
    def _stepped_out(self) -> Iterator[None]:
        """Record into the graph outside of the block for a moment."""
        inside = {name: vars(self)[name] for name in _OF_ONE_GRAPH}
        vars(self).update(self._outside.pop())
        try:
            yield
        finally:
            self._outside.append({name: vars(self)[name] for name in _OF_ONE_GRAPH})
            vars(self).update(inside)

    def _positions_of_outputs(self, needed: set[int]) -> tuple[tuple[int, str], ...]:
        held = are_held(self._alive, 1)  # the meta of its node
        found: dict[int, tuple[int, str]] = {}
        for index, alive in enumerate(held):
            tensor = self._alive[index]
            if (alive or id(tensor) in needed) and self._is_made_here(tensor):
                position = self._positions[id(tensor)]
                found[id(tensor)] = (position, operator_name(self._order[position].target))
        return tuple(found.values())

    def _is_made_here(self, tensor: torch.Tensor) -> bool:
        node = self._nodes.get(id(tensor))
        return isinstance(tensor, FakeTensor) and node is not None and node.op == "call_function"

    # --- arguments and results ----------------------------------------------------------------------

    def _argument(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            self._states.check_history(value)
        return self.node_of(value)

    def _track_result(self, func: OpOverload | None, node: Node, result: Any) -> Any:
        if isinstance(result, torch.Tensor):
            real = self._real_of.get(id(result))
            if real is not None:  # the operator gave back its argument, a real one
                if func is not None and is_inplace(func):
                    node.meta["fact"] = fact_of(result)
                return real
            returns_argument = id(result) in self._nodes
            anew = func is not None and (is_inplace(func) or self._is_layout_of_stand_in(func))
            if not returns_argument or (anew and not is_cacheable_leaf(result)):
                self._track(result, node)  # else it is one node still, of which eager may keep a cast
        elif isinstance(result, _SYMBOLIC):
            self.sizes.bind(result, node)
        elif isinstance(result, (list, tuple)):
            return self._track_items(func, node, result)
        return result

    def _is_layout_of_stand_in(self, func: OpOverload) -> bool:
        """Whether on the device that is stood in for *func* may copy what it gives back as it is here."""
        by = self.by
        stands_in = by is not None and by.policy.table != by.policy.device_type
        return stands_in and func is torch.ops.aten.contiguous.default

    def _track_items(self, func: OpOverload | None, node: Node, result: Any) -> Any:
        items = []
        for index, item in enumerate(result):
            if not isinstance(item, (torch.Tensor, list, tuple, *_SYMBOLIC)):
                items.append(item)
                continue
            part = self.graph.call_function(operator.getitem, (node, index))
            part.meta.update(node.meta)
            self._annotate(part, item)
            items.append(self._track_result(func, part, item))
        if isinstance(result, tuple) and hasattr(result, "_fields"):
            return type(result)(*items)
        return type(result)(items) if type(result) in (list, tuple) else result

    # --- tensors ------------------------------------------------------------------------------------

    def _track(self, tensor: torch.Tensor, node: Node) -> None:
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)
        self._positions[id(tensor)] = len(self._order)
        self._order.append(node)
        for size in tensor.shape if tensor.layout == torch.strided else ():
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                self.sizes.add_sizes_of(node, tensor)
                break

    def _release(self, node: Node, result: object) -> None:
        """Hold the newest *result* weakly until something else is recorded.

        A factory (``torch.zeros``) gives its caller the tensor itself only if nobody else holds it, and a
        copy that the recorder would not know otherwise (``make_variable`` in autograd/variable.h).
        """
        if isinstance(result, torch.Tensor) and node.meta.get("val") is result is self._alive[-1]:
            self._alive.pop()
            del node.meta["val"]
            self._latest = (node, id(result), TensorWeakRef(result))

    def _hold_latest(self) -> None:
        if self._latest is None:
            return
        (node, identity, reference), self._latest = self._latest, None
        tensor = reference()
        if tensor is not None:
            node.meta["val"] = tensor
            self._alive.append(tensor)
        else:  # nobody wants it, and its id may come back
            del self._nodes[identity], self._positions[identity]

    def _annotate(self, node: Node, value: object) -> None:
        node.meta["fact"] = fact_of(value)
        if self.concrete and isinstance(value, torch.Tensor):
            value = fake_like(self.fakes, value)
        node.meta["number" if isinstance(value, _SYMBOLIC) else "val"] = value

    def _node_of_tensor(self, tensor: torch.Tensor) -> Node:
        node = self._nodes.get(id(tensor))
        if node is not None:
            return node
        if self._outside:
            with self._stepped_out():
                outer = self._node_of_tensor(tensor)
            return self._lift_tensor(outer.name, outer.meta.get("val", tensor), Outer(outer), tensor)
        if id(tensor) in self._carried.tensors:
            fake, index = self._carried.tensors[id(tensor)]
            return self._lift_tensor(f"value_{index}", fake, Value(index), fake)
        if isinstance(tensor, FakeTensor):
            raise CaptureError(
                f"a tensor of dtype {tensor.dtype} and shape {tuple(tensor.shape)} was made out of the "
                "recorder's sight (.data, a legacy constructor, a tensor kept from another call)"
            )
        source = self._find(tensor) or Constant(tensor)
        node = self.graph.get_attr(self._name_of(source))
        self.sources[node] = source
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)
        self._annotate(node, self._fake_tensor(tensor))
        return node

    def _lift_tensor(self, name: str, fake: torch.Tensor, origin: Origin, tensor: torch.Tensor) -> Node:
        """A new input for *tensor*, which is *fake* or real."""
        node = self._lift(name, origin)
        self._annotate(node, fake)
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)
        return node

    def _name_of(self, source: Source) -> str:
        if not isinstance(source, Constant):
            return source.qualified
        self._constants += 1
        return f"_constant{self._constants - 1}"

    def _fake(self, values: Any) -> Any:
        def fake(value: Any) -> Any:
            return self._fake_tensor(value) if isinstance(value, torch.Tensor) else value

        return map_aggregate(values, fake)

    def _fake_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor) or self.concrete:
            return tensor
        if type(tensor) not in _TENSOR_CLASSES:
            raise CaptureError(f"tensors of class {type(tensor).__qualname__} are not recorded")
        if id(tensor) not in self._fake_of:
            fake = fake_like(self.fakes, tensor)
            self._fake_of[id(tensor)] = fake
            self._real_of[id(fake)] = tensor
            self._alive.append(tensor)
        return self._fake_of[id(tensor)]

    # --- the state around an operator ---------------------------------------------------------------

    def _here(self, func: OpOverload, values: Any) -> Site:
        """Where *func* is called, for the selectors of overrides."""
        if self._site is not None:
            return replace(self._site, operator=func, inputs=inputs_of(values))
        assert self.by is not None
        where = where_now(self.modules[-1])
        return site_of(func, values, where, tuple(self.modules), self.scopes_now(), self.by.placed)

    def scopes_now(self) -> frozenset[int]:
        """Which overrides select one of the modules that are being called."""
        return frozenset[int]().union(*(self.scopes.get(path, ()) for path in self.modules))

    def _observe_modes(self) -> None:
        region = observe_region(self._region.device_type)
        if region != self._region:
            if self._pause is not None and region.enabled and region.dtype != self._low:
                raise CaptureError("a call that reads values has regions of two low precision dtypes")
            self.graph.call_function(enter_region, (cast("Any", region),)).meta["fact"] = None
            self._region = region
        self._observe_grad(torch.is_grad_enabled())

    def _observe_grad(self, enabled: bool) -> None:  # noqa: FBT001
        if enabled != self.grad:
            self.graph.call_function(set_grad_enabled, (enabled,)).meta["fact"] = None
            self.grad = enabled
