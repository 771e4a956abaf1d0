"""A graph of Dynamo's, or a run of operators in one, as a call: captured at the first call, then flat code.

Capture waits for the call, because only then the tensors are there: which of them are leaves decides which
casts eager autocast keeps.  What Dynamo guards (dtypes, devices, the state of autocast) is not tested
again; what it does not guard selects one of several programs.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from fxamp.capture.capture import capture, plain_saved_tensors
from fxamp.capture.guards import Guard, shape_guard
from fxamp.capture.segments import Captured
from fxamp.capture.sources import Constant
from fxamp.capture.structure import Spec, flatten, unflatten
from fxamp.errors import CaptureError, InvariantError, PolicyError
from fxamp.ir.regions import Region, no_autocast
from fxamp.passes import build_pipeline, run_passes
from fxamp.policy.scopes import place
from fxamp.runtime.autocast_cache import cached_cast
from fxamp.runtime.dynamo_graph import Inputs
from fxamp.runtime.lower import lower
from fxamp.runtime.surroundings import Surroundings, is_inside_a_region

__all__ = ["GraphPiece", "Inner"]

Inner = Callable[[GraphModule, Captured], Callable[..., Any]]
"""Compiles a rewritten graph: ``inner(module, captured)`` gives a function of its inputs."""

_LOG = logging.getLogger("fxamp")
_MOST_PROGRAMS = 16


class GraphPiece(nn.Module):
    """Runs one graph as eager autocast would, by programs.

    Args:
        module: The graph, at torch level, its parameters among the inputs.
        inputs: What is known of its inputs.
        surroundings: Says which region a call is in, and by which policy.
        inner: The compiler of the rewritten graph; ``None`` for flat code.
        plain: Runs the graph as it is, where there is nothing to cast or it cannot be captured.

    Attributes:
        reasons: Why calls run without a program of fxamp, the latest last.
    """

    def __init__(
        self,
        module: GraphModule,
        inputs: Inputs,
        surroundings: Surroundings,
        inner: Inner | None = None,
        plain: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        self.reasons: list[str] = []
        self._function = module.forward
        self._plain = module.forward if plain is None else plain
        self._inputs, self._surroundings, self._inner = inputs, surroundings, inner
        self._programs: dict[Any, list[_Program]] = {}
        self._failed: set[Any] = set()
        self._lock = threading.RLock()

    def forward(self, *args: Any) -> Any:
        """The outputs of the graph."""
        region = self._surroundings.region(args)
        if not region.enabled:
            return self._plain(*args)
        around = is_inside_a_region()
        key = (self._key(args), region, around)
        spec, leaves = _flatten(args)
        program = self._find(key, spec, leaves) or self._make(key, spec, leaves, region, around=around)
        if program is not None:
            with no_autocast():
                return program(leaves)
        if around:
            return self._plain(*args)
        with region.context():
            return self._plain(*args)

    def _key(self, args: Sequence[Any]) -> Any:
        """What selects a program and is not guarded by Dynamo: leaves, and the layout of what varies."""
        leaves = tuple([_leaf(arg) for arg in args])
        layouts = tuple(
            [_layout(arg) for arg, sizes in zip(args, self._inputs.symbolic, strict=True) if sizes]
        )
        return leaves, layouts, torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def _find(self, key: Any, spec: Spec, leaves: list[Any]) -> _Program | None:
        for program in self._programs.get(key, ()):
            if program.spec == spec and program.guard.holds(leaves):
                return program
        return None

    def _make(
        self, key: Any, spec: Spec, leaves: list[Any], region: Region, *, around: bool
    ) -> _Program | None:
        if torch._C._current_graph_task_id() != -1:
            return None  # inside backward, where a reentrant checkpoint calls again: not captured, not failed
        with self._lock:
            program = self._find(key, spec, leaves)  # another thread may have been faster
            if program is not None or key in self._failed:
                return program
            if len(self._programs.get(key, ())) == _MOST_PROGRAMS:
                self._fail(key, f"it was captured for {_MOST_PROGRAMS} sizes, and is called with more")
                return None
            try:
                program = self._build(spec, leaves, region, around=around)
            except CaptureError as error:
                self._fail(key, str(error))
                return None
            except (PolicyError, InvariantError):
                raise
            except Exception as error:  # noqa: BLE001  eager autocast would have run the graph, so it is run
                self._fail(key, f"a fault of fxamp: {type(error).__name__}: {error}")
                return None
            self._programs.setdefault(key, []).insert(0, program)
            return program

    def _fail(self, key: Any, reason: str) -> None:
        """Note that calls like this one get no program."""
        policy = self._surroundings.policy
        if policy is not None and not policy.is_torchs_own:
            raise PolicyError(f"a graph of torch.compile cannot be captured, so not under {policy}: {reason}")
        self._failed.add(key)
        self.reasons.append(reason)
        _LOG.warning("a graph of torch.compile runs without a program of fxamp: %s", reason)

    def _build(self, spec: Spec, leaves: list[Any], region: Region, *, around: bool) -> _Program:
        _refuse_subclasses(leaves)
        with plain_saved_tensors():
            policy = self._surroundings.policy_in(region)
            placed = None if policy.is_torchs_own else place(policy, None)
            shapes = self._inputs.symbolic
            captured = capture(self._function, spec, leaves, region, dynamic_shapes=shapes, placed=placed)
            constants = _constants(captured)
            module = GraphModule(
                {str(node.target): value for node, value in constants.items()}, captured.graph, "AmpGraph"
            )
            run_passes(module, build_pipeline(captured, policy))
        if self._inner is not None:
            compiled = self._inner(module, captured)
            return _Program(spec, lambda inputs: compiled(*inputs), captured.result, _guard(captured))
        code = lower(module.graph, cached_cast if around else None)
        _LOG.debug("a graph of torch.compile as flat code:\n%s", code.text)
        tensors = [constants[node] for node in module.graph.find_nodes(op="get_attr")]
        return _Program(spec, lambda inputs: code.run(inputs, tensors), captured.result, _guard(captured))


def _refuse_subclasses(leaves: Sequence[torch.Tensor]) -> None:
    for leaf in leaves:
        if type(leaf) not in (torch.Tensor, nn.Parameter, nn.Buffer):
            raise CaptureError(f"an input is of class {type(leaf).__qualname__}")


@dataclass(frozen=True, eq=False)
class _Program:
    spec: Spec
    run: Callable[[Sequence[Any]], Sequence[Any]]
    result: Spec | None
    guard: Guard

    def __call__(self, leaves: Sequence[Any]) -> Any:
        assert self.result is not None
        return unflatten(self.result, self.run(leaves))


def _guard(captured: Captured) -> Guard:
    return shape_guard(captured.opening, captured.env)


def _constants(captured: Captured) -> dict[Node, torch.Tensor]:
    """The tensors that the graph holds itself."""
    sources = captured.sources.items()
    return {node: source.tensor for node, source in sources if isinstance(source, Constant)}


def _flatten(args: Sequence[Any]) -> tuple[Spec, list[Any]]:
    if all(isinstance(arg, torch.Tensor) for arg in args):
        return _only_tensors(len(args)), list(args)
    return flatten((tuple(args), {}))


@functools.cache
def _only_tensors(count: int) -> Spec:
    return flatten(((torch.empty(0),) * count, {}))[0]


def _leaf(arg: Any) -> bool | None:
    """Whether eager autocast would keep a cast of *arg*; ``None`` without gradient."""
    if not isinstance(arg, torch.Tensor) or not arg.requires_grad:
        return None
    return arg.is_leaf and not arg._is_view()


def _layout(tensor: torch.Tensor) -> Any:
    """The order of the dimensions in memory."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return tensor.layout
    strides = tensor.stride()
    return tuple(sorted(range(len(strides)), key=strides.__getitem__, reverse=True))
