"""The recorder: every operator that reaches the dispatcher becomes one node, as autocast would see it.

Eager autocast acts above autograd and above every decomposition, so that is where the recorder listens:
on the PreDispatch key, with the autocast region on and fake tensors below.  Each operator is recorded as
called, then really dispatched, and the fake result carries the dtype that eager autocast gives it.
Composite operators stay whole; in-place operators stay in place.

What cannot be recorded faithfully raises :class:`~fxamp.errors.CaptureError`: a tensor that was made out
of the recorder's sight, a custom ``autograd.Function`` that takes part in the gradient, checkpointing,
functorch transforms, gradients taken inside ``forward``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, cast

import sympy
import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import detach_variable
from torch.utils.weak import TensorWeakRef

from fxamp.capture.attribute_reads import Read
from fxamp.capture.kernel_dtypes import with_kernel_dtypes
from fxamp.capture.pause import Pause
from fxamp.capture.plain_fakes import fake_like
from fxamp.capture.recording_mode import RecordingMode
from fxamp.capture.refused_states import RefusedStates
from fxamp.capture.segments import (
    Block,
    Captured,
    Carried,
    NeedsValuesError,
    Number,
    Origin,
    Outer,
    Recording,
    Value,
    are_held,
)
from fxamp.capture.sources import Constant, Source
from fxamp.capture.structure import unflatten
from fxamp.capture.symbols import Opening, SizeNodes
from fxamp.errors import CaptureError, PolicyError
from fxamp.ir.blocks import Checkpointed, CustomFunction
from fxamp.ir.facts import fact_of, is_cacheable_leaf
from fxamp.ir.operators import is_composite, is_inplace, operator_name
from fxamp.ir.regions import Region, enter_region, observe_region, run_in_region
from fxamp.ir.where import where_now
from fxamp.policy.dispatcher import registered
from fxamp.policy.reentrant import REENTRANT

__all__ = ["Recorder", "RecordingMode", "set_grad_enabled"]

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
_TENSOR_CLASSES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
_QUERIES = ("aten::sym_", "aten::is_", "aten::dim", "aten::numel", "prim::")
_READS = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero")
_SPARSE_READS = frozenset(
    f"aten::{name}"
    for name in ("indices", "_indices", "values", "_values", "_nnz", "crow_indices", "col_indices")
)
_REFUSED_BY_FAKES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
_AUTOCAST_ERRORS = ("unsafe to autocast", "Unexpected floating ScalarType in at::autocast::prioritize")


class Recorder:
    """Writes one graph.

    Args:
        fakes: The mode that the fake tensors live in.
        region: The state of autocast at the start of the call.
        find: Where a real tensor comes from, by identity; ``None`` makes it a constant.
        concrete: Whether the operators run on real tensors (the body of a composite operator that picks
            its implementation by the kind of tensor), instead of on fakes of them.
        pause: Where real values are to be had when fake tensors do not do; without it such a call is refused.

    Attributes:
        graph: What has been recorded of the present segment.
        sources: The origin of each ``get_attr`` node in it.
        origins: What each of its inputs is.
        modules: The module paths that are being called, innermost last.
        unnoted: Makes a context for reads that are not the model's.
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
    ) -> None:
        self.fakes, self.region, self._find, self.concrete = fakes, region, find, concrete
        self._region, self._low = region, region.dtype
        self._pause = pause
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
        self.opening = Opening(tuple(values), self.opening.symbols, len(env.guards), len(env.outcomes))
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
        )

    # --- segments -----------------------------------------------------------------------------------

    def _go_on_with_real_values(
        self, error: Exception, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> object:
        """End the segment with a call of *func* for real; its results begin the next one."""
        pause = self._pause
        if self._outside and pause is not None:
            raise CaptureError(f"a checkpointed function reads values of tensors ({func.name()})")
        if pause is None:
            raise NeedsValuesError(f"{func.name()} needs values of tensors: {error}") from error
        tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        segment = self._leave_segment({id(tensor) for tensor in tensors})
        operator, called = self._record_alone(func, args, kwargs)
        segment = replace(segment, operator=operator)
        try:
            spec, values = pause.results_of(segment)
        except CaptureError:
            raise
        except Exception as failure:  # the call ends here, whatever Python makes of it
            raise CaptureError(f"{func.name()} raises {type(failure).__name__}: {failure}") from failure
        called.meta["fact"] = tuple(fact_of(value) for value in values) or None
        del segment
        self._open()
        for value in values:
            self._carried.add(value)
        self.begin_with(values)
        return unflatten(spec, [pause.answer(value) for value in values])

    def _leave_segment(self, needed: set[int]) -> Captured:
        """Finish the segment; its outputs are the *needed* tensors and those that Python may still use."""
        assert self._pause is not None
        dropped = self._carried.drop_dead(needed, self._nodes)
        positions = self._pause.expected()
        if positions is None:
            positions = self._positions_of_outputs(needed)
        nodes = self._at(positions)
        tensors = {
            self._positions[key]: tensor for tensor in self._alive if (key := id(tensor)) in self._positions
        }
        self._end(tuple(nodes))
        for position, _ in positions:
            self._carried.add(tensors.get(position))
        return replace(self.segment(), dropped=dropped, positions=positions)

    def _positions_of_outputs(self, needed: set[int]) -> tuple[tuple[int, str], ...]:
        held = are_held(self._alive, 1)  # the meta of its node
        found: dict[int, tuple[int, str]] = {}
        for index, alive in enumerate(held):
            tensor = self._alive[index]
            if (alive or id(tensor) in needed) and self._is_made_here(tensor):
                position = self._positions[id(tensor)]
                found[id(tensor)] = (position, operator_name(self._order[position].target))
        return tuple(found.values())

    def _at(self, positions: tuple[tuple[int, str], ...]) -> list[Node]:
        """The nodes that were recorded at *positions*."""
        for position, name in positions:
            if position >= len(self._order) or operator_name(self._order[position].target) != name:
                raise CaptureError("forward takes another way when it is recorded again")
        return [self._order[position] for position, _ in positions]

    def _is_made_here(self, tensor: torch.Tensor) -> bool:
        node = self._nodes.get(id(tensor))
        return isinstance(tensor, FakeTensor) and node is not None and node.op == "call_function"

    def _record_alone(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Recording, Node]:
        """*func* in a graph of its own, in a real region if autocast has anything to do with it."""
        self._open()
        where = where_now(self.modules[-1])
        self._observe_grad(torch.is_grad_enabled())
        nodes: Any = map_aggregate((args, kwargs), self._argument)
        region = observe_region(self._region.device_type)
        if region.enabled and _consults_autocast(func, region.device_type):
            node = self._call_function(run_in_region, (region, func, *nodes[0]), nodes[1])
        else:
            node = self._call_function(func, nodes[0], nodes[1])
        node.meta.update(where=where, fact=None)
        self._observe_grad(self.grad_at_entry)
        self.graph.output((node,))
        return Recording(self.graph, self.sources, tuple(self.origins)), node

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

    def region_now(self) -> Region:
        """The state of autocast."""
        return observe_region(self.region.device_type)

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

    # --- operators ----------------------------------------------------------------------------------

    def record(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Record the call of one operator and give its fake result."""
        try:
            return self._record(func, args, kwargs)
        except (CaptureError, *_REFUSED_BY_FAKES) as error:
            self.refuse(error)
            raise

    def refuse(self, error: Exception) -> None:
        """Remember why this call cannot be recorded, even if the user's code catches *error* and goes on."""
        self._refusal = self._refusal or error

    def raise_refusal(self) -> None:
        """Raise what was refused first, if anything was."""
        if self._refusal is not None:
            raise self._refusal

    def _record(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        self._hold_latest()
        if func.name().startswith(_QUERIES):
            return self._query(func, args, kwargs)
        self._states.check_context()
        self._states.check_generators((*args, *kwargs.values()))
        if func in _LIFTS and not isinstance(args[0], FakeTensor):
            return self._record_literal(func, args[0])
        if func is torch.ops.aten.detach_.default and not args[0].requires_grad:
            return args[0]  # the tail of torch.tensor(...)
        if func.name() in _SPARSE_READS and args[0].layout is not torch.strided:
            error = DataDependentOutputException(func)  # a fake sparse tensor has no elements
            return self._go_on_with_real_values(error, func, args, kwargs)
        where = where_now(self.modules[-1])
        self._observe_modes()
        nodes: Any = map_aggregate((args, kwargs), self._argument)
        fake_args, fake_kwargs = self._fake(args), self._fake(kwargs)
        try:
            result = self._dispatch(func, fake_args, fake_kwargs, where)
        except (CaptureError, PolicyError):
            raise
        except Exception as error:
            if self.concrete or func._schema.is_mutable:
                raise
            return self._go_on_with_real_values(error, func, args, kwargs)
        node = self._call_function(func, nodes[0], nodes[1])
        node.meta["where"] = where
        self._annotate(node, result)
        tracked = self._track_result(func, node, result)
        if self._nodes.get(id(result)) is node:
            self._release(node, result)
        return tracked

    def _query(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """What Python asks of a tensor without making another one; mostly its fake knows."""
        try:
            return func(*self._fake(args), **self._fake(kwargs))
        except _REFUSED_BY_FAKES as error:
            return self._go_on_with_real_values(error, func, args, kwargs)

    def _call_function(self, func: Callable[..., object], args: Any, kwargs: Any) -> Node:
        called: Any = args[1] if func is run_in_region else func
        name = called._schema.name.split("::")[-1]
        return self.graph.create_node("call_function", func, args, kwargs, name=name)

    def _dispatch(self, func: OpOverload, args: Any, kwargs: Any, where: object) -> object:
        try:
            result = self._call_as_on_real_tensors(func, args, kwargs)
        except RuntimeError as error:
            if any(text in str(error) for text in _AUTOCAST_ERRORS):
                raise PolicyError(f"{error}\n  at {func.name()} ({where})") from error
            raise
        consults = self._region.enabled and func.name() in REENTRANT
        if consults and not self.concrete and not is_inplace(func):
            return with_kernel_dtypes(func, args, kwargs, result)
        return result

    def _call_as_on_real_tensors(self, func: OpOverload, args: Any, kwargs: Any) -> object:
        """Call *func*; open a composite operator above autocast, as the dispatcher does for real tensors.

        In inference mode it would reach the fake mode whole, which opens it below autocast.
        """
        whole = not is_composite(func) or registered(func.name(), self._region.device_type)
        if whole or self.concrete or not self._states.inference:
            return func(*args, **kwargs)
        with RecordingMode(self._call_as_on_real_tensors):
            return func.decompose(*args, **kwargs)

    def _record_literal(self, func: OpOverload, real: torch.Tensor) -> object:
        """``torch.tensor(...)``: the value is a constant of the program, each call gets a fresh copy."""
        where = where_now(self.modules[-1])
        self._observe_modes()
        constant = self._node_of_tensor(real)
        node = self._call_function(torch.ops.aten.clone.default, (constant,), {})
        node.meta["where"] = where
        result = func(real)
        self._annotate(node, result)
        return self._track_result(func, node, result)

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
            inplace = func is not None and is_inplace(func)
            if not returns_argument or (inplace and not is_cacheable_leaf(result)):
                self._track(result, node)  # else it is one node still, of which eager may keep a cast
        elif isinstance(result, _SYMBOLIC):
            self.sizes.bind(result, node)
        elif isinstance(result, (list, tuple)):
            return self._track_items(func, node, result)
        return result

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


def _consults_autocast(func: OpOverload, device_type: str) -> bool:
    """Whether a real region makes a difference to *func*."""
    if func.name() in _READS:
        return False
    foreign = func.namespace != "aten"
    return foreign or is_composite(func) or registered(func.name(), device_type) or func.name() in REENTRANT
