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
from collections.abc import Callable
from typing import Any, cast

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.autograd.function import BackwardCFunction
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import TensorWeakRef

from fxamp.capture.kernel_dtypes import with_kernel_dtypes
from fxamp.capture.sources import Constant, Source
from fxamp.capture.symbols import SizeNodes
from fxamp.errors import CaptureError, PolicyError
from fxamp.ir.facts import fact_of, is_cacheable_leaf
from fxamp.ir.operators import is_composite, is_inplace
from fxamp.ir.regions import Region, enter_region, observe_region
from fxamp.ir.where import where_now
from fxamp.policy.dispatcher import registered
from fxamp.policy.reentrant import REENTRANT

__all__ = ["Recorder", "RecordingMode", "set_grad_enabled"]

set_grad_enabled = torch._C._set_grad_enabled
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_TENSOR_CLASSES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
_QUERIES = ("aten::sym_", "aten::is_", "aten::dim", "aten::numel", "prim::")
_REFUSED_BY_FAKES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
_AUTOCAST_ERRORS = ("unsafe to autocast", "Unexpected floating ScalarType in at::autocast::prioritize")


def saved_tensors_hooks() -> object:
    """The pair of hooks that autograd now packs saved tensors with, or ``None``."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: FBT003


class RecordingMode(ProxyTorchDispatchMode):
    """Hands every operator that is called to *record*; torch lets only a proxy mode listen that high."""

    def __init__(self, record: Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], object]) -> None:
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)
        self._mode_key = torch._C._TorchDispatchModeKey.PROXY
        self.enter_stack = []
        self.pre_dispatch = True
        self.decomposition_table = {}
        self._decomposition_table_stack = []
        self.emulate_precision_casts = False
        self._record = record

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        return self._record(func, args, kwargs or {})

    def __sym_dispatch__(
        self, func: Callable[..., object], types: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> object:
        return func(*args, **kwargs)


class Recorder:
    """Writes one graph.

    Args:
        fakes: The mode that the fake tensors live in.
        region: The state of autocast at the start.
        find: Where a real tensor comes from, by identity; ``None`` makes it a constant.
        concrete: Whether the operators run on real tensors (the body of a composite operator that picks
            its implementation by the kind of tensor), instead of on fakes of them.

    Attributes:
        graph: What has been recorded.
        sources: The origin of each ``get_attr`` node.
        modules: The module paths that are being called, innermost last.
    """

    def __init__(
        self,
        fakes: FakeTensorMode,
        region: Region,
        find: Callable[[torch.Tensor], Source | None],
        *,
        concrete: bool = False,
    ) -> None:
        self.fakes, self._region, self._find, self.concrete = fakes, region, find, concrete
        self.graph = Graph()
        self.sizes = SizeNodes(self.graph)
        self.sources: dict[Node, Source] = {}
        self.modules: list[str] = [""]
        self.grad_at_entry = self.grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._hooks = saved_tensors_hooks()
        self._refusal: Exception | None = None
        self._nodes: dict[int, Node] = {}
        self._alive: list[object] = []
        self._latest: tuple[Node, int, TensorWeakRef] | None = None
        self._fake_of: dict[int, torch.Tensor] = {}
        self._real_of: dict[int, torch.Tensor] = {}

    # --- inputs and outputs -------------------------------------------------------------------------

    def add_input(self, fake: torch.Tensor, name: str) -> Node:
        """Make *fake* an input of the graph."""
        node = self.graph.placeholder(name)
        self._annotate(node, fake)
        self._track(fake, node)
        self.sizes.add_sizes_of(node, fake)
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
        self._observe_grad(self.grad_at_entry)
        self.graph.output(tuple(nodes))

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
            return func(*self._fake(args), **self._fake(kwargs))
        self._check_context()
        _refuse_generators((*args, *kwargs.values()))
        if func in _LIFTS and not isinstance(args[0], FakeTensor):
            return self._record_literal(func, args[0])
        if func is torch.ops.aten.detach_.default and not args[0].requires_grad:
            return args[0]  # the tail of torch.tensor(...)
        where = where_now(self.modules[-1])
        self._observe_modes()
        nodes: Any = map_aggregate((args, kwargs), self._argument)
        fake_args, fake_kwargs = self._fake(args), self._fake(kwargs)
        result = self._dispatch(func, fake_args, fake_kwargs, where)
        node = self._call_function(func, nodes[0], nodes[1])
        node.meta["where"] = where
        self._annotate(node, result)
        tracked = self._track_result(func, node, result)
        if self._nodes.get(id(result)) is node:
            self._release(node, result)
        return tracked

    def _call_function(self, func: OpOverload, args: Any, kwargs: Any) -> Node:
        name = func._schema.name.split("::")[-1]
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
        if whole or self.concrete or not self._inference:
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
            self._check_history(value)
        return self.node_of(value)

    def _track_result(self, func: OpOverload, node: Node, result: Any) -> Any:
        if isinstance(result, torch.Tensor):
            real = self._real_of.get(id(result))
            if real is not None:  # the operator gave back its argument, a real one
                if is_inplace(func):
                    node.meta["fact"] = fact_of(result)
                return real
            returns_argument = id(result) in self._nodes
            if not returns_argument or (is_inplace(func) and not is_cacheable_leaf(result)):
                self._track(result, node)  # else it is one node still, of which eager may keep a cast
        elif isinstance(result, _SYMBOLIC):
            self.sizes.bind(result, node)
        elif isinstance(result, (list, tuple)):
            return self._track_items(func, node, result)
        return result

    def _track_items(self, func: OpOverload, node: Node, result: Any) -> Any:
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
            self._latest = (node, id(result), TensorWeakRef(cast("torch.Tensor", result)))

    def _hold_latest(self) -> None:
        if self._latest is None:
            return
        (node, identity, reference), self._latest = self._latest, None
        tensor = reference()
        if tensor is not None:
            node.meta["val"] = tensor
            self._alive.append(tensor)
        else:  # nobody wants it, and its id may come back
            del self._nodes[identity]

    def _annotate(self, node: Node, value: object) -> None:
        node.meta["fact"] = fact_of(value)
        if self.concrete and isinstance(value, torch.Tensor):
            value = self._fake_like(value)
        node.meta["number" if isinstance(value, _SYMBOLIC) else "val"] = value

    def _node_of_tensor(self, tensor: torch.Tensor) -> Node:
        node = self._nodes.get(id(tensor))
        if node is not None:
            return node
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

    def _name_of(self, source: Source) -> str:
        if not isinstance(source, Constant):
            return source.qualified
        return f"_constant{sum(isinstance(other, Constant) for other in self.sources.values())}"

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
            fake = self._fake_like(tensor)
            self._fake_of[id(tensor)] = fake
            self._real_of[id(fake)] = tensor
            self._alive.append(tensor)
        return self._fake_of[id(tensor)]

    def _fake_like(self, tensor: torch.Tensor) -> torch.Tensor:
        fake = self.fakes.from_tensor(tensor.detach(), static_shapes=True)
        return fake.requires_grad_(tensor.requires_grad)

    # --- the state around an operator ---------------------------------------------------------------

    def _observe_modes(self) -> None:
        region = observe_region(self._region.device_type)
        if region != self._region:
            self.graph.call_function(enter_region, (cast("Any", region),)).meta["fact"] = None
            self._region = region
        self._observe_grad(torch.is_grad_enabled())

    def _observe_grad(self, enabled: bool) -> None:  # noqa: FBT001
        if enabled != self.grad:
            self.graph.call_function(set_grad_enabled, (enabled,)).meta["fact"] = None
            self.grad = enabled

    def _check_context(self) -> None:
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise CaptureError("a torch.func transform (vmap, grad, ...) is active")
        if torch._C._current_graph_task_id() != -1:
            raise CaptureError("gradients are taken inside forward (autograd.grad or backward)")
        if torch.is_grad_enabled() and saved_tensors_hooks() != self._hooks:
            raise CaptureError("saved-tensor hooks are active (torch.utils.checkpoint)")
        if torch.is_inference_mode_enabled() != self._inference:
            raise CaptureError("forward enters or leaves inference mode")

    def _check_history(self, tensor: torch.Tensor) -> None:
        if tensor._backward_hooks and isinstance(tensor, FakeTensor):
            raise CaptureError("a hook is registered on a tensor inside forward")
        if not tensor.requires_grad or tensor.grad_fn is None:
            return
        if isinstance(tensor.grad_fn, BackwardCFunction):
            name = type(tensor.grad_fn).__name__.removesuffix("Backward")
            raise CaptureError(f"the custom autograd.Function {name} takes part in the gradient")
        if tensor.retains_grad:
            raise CaptureError("retain_grad() is called on a tensor inside forward")


def _refuse_generators(values: tuple[Any, ...]) -> None:
    for value in values:
        if isinstance(value, torch.Generator) and value is not torch.default_generator:
            raise CaptureError("a random generator of the model's own is used, which Python may seed anew")
