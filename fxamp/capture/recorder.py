"""The recorder: every operator that reaches the dispatcher becomes one node, as autocast would see it.

Eager autocast acts above autograd and above every decomposition, so that is where the recorder listens:
on the PreDispatch key, with the autocast region on and fake tensors below.  Each operator is recorded as
called, then really dispatched, and the fake result carries the dtype that eager autocast gives it.
Composite operators stay whole; in-place operators stay in place.

Where an operator needs values, it is called for real and a new segment begins.  What cannot be recorded
faithfully raises :class:`~fxamp.errors.CaptureError`: a tensor that was made out of the recorder's sight,
functorch transforms, gradients taken inside ``forward``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.fx import Node
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from fxamp.capture.block_recorder import BlockRecorder
from fxamp.capture.graph_writer import set_grad_enabled
from fxamp.capture.kernel_dtypes import with_kernel_dtypes
from fxamp.capture.recording_mode import RecordingMode
from fxamp.capture.segments import (
    Captured,
    NeedsValuesError,
    Recording,
)
from fxamp.capture.structure import unflatten
from fxamp.capture.time_loops import is_time_loop, loop_on_fakes
from fxamp.errors import CaptureError, PolicyError
from fxamp.ir.facts import fact_of
from fxamp.ir.operators import is_composite, is_inplace, operator_name
from fxamp.ir.regions import observe_region, run_in_region
from fxamp.ir.where import where_now
from fxamp.policy.dispatcher import registered
from fxamp.policy.override import Ruling
from fxamp.policy.reentrant import REENTRANT
from fxamp.policy.site import Site

__all__ = ["Recorder", "set_grad_enabled"]

_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
_QUERIES = ("aten::sym_", "aten::is_", "aten::dim", "aten::numel", "prim::")
_READS = ("aten::item", "aten::_local_scalar_dense", "aten::is_nonzero")
_SPARSE_READS = frozenset(
    f"aten::{name}"
    for name in ("indices", "_indices", "values", "_values", "_nnz", "crow_indices", "col_indices")
)
_REFUSED_BY_FAKES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
_AUTOCAST_ERRORS = ("unsafe to autocast", "Unexpected floating ScalarType in at::autocast::prioritize")


class Recorder(BlockRecorder):
    """Writes the graphs of one call, a segment at a time; made like a :class:`GraphWriter`."""

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

    def _at(self, positions: tuple[tuple[int, str], ...]) -> list[Node]:
        """The nodes that were recorded at *positions*."""
        for position, name in positions:
            if position >= len(self._order) or operator_name(self._order[position].target) != name:
                raise CaptureError("forward takes another way when it is recorded again")
        return [self._order[position] for position, _ in positions]

    def _record_alone(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Recording, Node]:
        """*func* in a graph of its own, in a real region if autocast has anything to do with it."""
        self._open()
        where = where_now(self.modules[-1])
        self._observe_grad(torch.is_grad_enabled())
        nodes: Any = map_aggregate((args, kwargs), self._argument)
        region = self.region_now()
        if self._is_cast_somewhere(func):
            node = self._call_function(run_in_region, (region, func, *nodes[0]), nodes[1])
        else:
            node = self._call_function(func, nodes[0], nodes[1])
        node.meta.update(where=where, fact=None)
        self._observe_grad(self.grad_at_entry)
        self.graph.output((node,))
        return Recording(self.graph, self.sources, tuple(self.origins)), node

    def _is_cast_somewhere(self, func: OpOverload) -> bool:
        """Whether the state of autocast makes a difference to *func*."""
        if self.by is not None and self.by.policy.overrides:
            return func.name() not in _READS
        region = observe_region(self._region.device_type)
        table = self.by.policy.table if self.by is not None else region.device_type
        return region.enabled and _consults_autocast(func, table)

    # --- operators ----------------------------------------------------------------------------------

    def record(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Record the call of one operator and give its fake result."""
        try:
            return self._record(func, args, kwargs)
        except (CaptureError, *_REFUSED_BY_FAKES) as error:
            self.refuse(error)
            raise

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
            site = self._site_for_overrides(func, (fake_args, fake_kwargs))
            ruling = self.by.ruling_at(site) if self.by is not None and site is not None else None
            result = self._dispatch(func, fake_args, fake_kwargs, where, ruling)
        except (CaptureError, PolicyError):
            raise
        except Exception as error:
            if self.concrete or func._schema.is_mutable:
                raise
            return self._go_on_with_real_values(error, func, args, kwargs)
        node = self._call_function(func, nodes[0], nodes[1])
        node.meta["where"] = where
        node.meta.update({"whole": True} if self._is_whole(func, fake_args, fake_kwargs) else {})
        if site is not None:
            node.meta.update(ruling=ruling, site=site)
        self._annotate(node, result)
        tracked = self._track_result(func, node, result)
        if self._nodes.get(id(result)) is node:
            self._release(node, result)
        return tracked

    def _site_for_overrides(self, func: OpOverload, values: Any) -> Site | None:
        """Where *func* is called, if an override may ask."""
        return self._here(func, values) if self.by is not None and self.by.policy.overrides else None

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

    def _dispatch(
        self, func: OpOverload, args: Any, kwargs: Any, where: object, ruling: Ruling | None
    ) -> object:
        try:
            if self.by is not None:
                result = self.by.call_in(self._region, func, args, kwargs, ruling)
            elif self._is_whole(func, args, kwargs):
                result = loop_on_fakes(func, args, self._call_as_on_real_tensors)
            else:
                result = self._call_as_on_real_tensors(func, args, kwargs)
        except PolicyError as error:
            raise PolicyError(f"{error}\n  at {func.name()} ({where})") from error
        except RuntimeError as error:
            if any(text in str(error) for text in _AUTOCAST_ERRORS):
                raise PolicyError(f"{error}\n  at {func.name()} ({where})") from error
            raise
        if not torch.is_grad_enabled():
            _end_gradient(result, (args, kwargs))
        consults = self._region.enabled and func.name() in REENTRANT
        if consults and not self.concrete and not is_inplace(func):
            call = partial(self.by.call_in, self._region, func) if self.by is not None else None
            return with_kernel_dtypes(func, args, kwargs, result, call)
        return result

    def _is_whole(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the call of *func* stays one node although operators with a rule are inside."""
        usual = self.whole_loops and self.by is None and not self.concrete and not kwargs
        return usual and is_time_loop(func, args, self._region)

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


def _end_gradient(result: Any, given: Any) -> None:
    """Without gradients no new tensor requires one; some decompositions (``constant_pad_nd``) forget it."""
    tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    leaves = [tensor for tensor in tensors if tensor.requires_grad and tensor.is_leaf]
    known = {id(leaf) for leaf in pytree.tree_leaves(given)} if leaves else ()
    for tensor in leaves:
        if id(tensor) not in known:
            tensor.requires_grad = False


def _consults_autocast(func: OpOverload, device_type: str) -> bool:
    """Whether a real region makes a difference to *func*."""
    if func.name() in _READS:
        return False
    foreign = func.namespace != "aten"
    return foreign or is_composite(func) or registered(func.name(), device_type) or func.name() in REENTRANT
