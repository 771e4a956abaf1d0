"""Capture: run a callable's Python once on fake tensors and keep what reached the dispatcher.

``capture`` needs nothing of the user's but the callable and the arguments of one call.  Afterwards
modules, buffers and random states are as before.  A program is first captured with symbolic sizes
(``Sizes`` says which); where the model's Python cannot take them, once more with those of the example.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxamp.capture.attribute_reads import AttributeReads, Read
from fxamp.capture.dynamic_shapes import symbolic_sizes
from fxamp.capture.mirror import Mirror
from fxamp.capture.recorder import Recorder, RecordingMode
from fxamp.capture.refusals import randomness_refused, torchscript_refused
from fxamp.capture.sources import Place, Source, places_of
from fxamp.capture.structure import Spec, flatten, unflatten
from fxamp.capture.symbols import ObservedShapeEnv, Sizes, fake_input
from fxamp.errors import CaptureError, PolicyError
from fxamp.ir.regions import Region

_LOGGERS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")

__all__ = ["Captured", "capture", "plain_saved_tensors", "pre_dispatch_lock", "recording"]

pre_dispatch_lock = threading.RLock()
"""Torch keeps the stack of pre-dispatch modes once per process: one recording at a time."""


@dataclass(frozen=True)
class Captured:
    """One recorded call.

    Attributes:
        graph: Inputs, then sources, then operators; the outputs are the result's tensors, then the
            tensors that are put back into attributes.
        region: The state of autocast that the call began in.
        fakes: The mode that the fake tensors in ``node.meta["val"]`` live in.
        env: What is known of their sizes.
        sources: Where each ``get_attr`` node's tensor lives.
        result: The structure of the result.
        rebound: Where the trailing outputs go, one place each.
        inputs: The fake inputs; the passes may still add guards on their sizes.
        grad: Whether gradients were recorded at the start.
        reads: The attributes of modules that Python read.
    """

    graph: Graph
    region: Region
    fakes: FakeTensorMode
    env: ShapeEnv
    sources: dict[Node, Source]
    result: Spec
    rebound: tuple[Place, ...]
    inputs: tuple[torch.Tensor, ...]
    grad: bool
    reads: tuple[Read, ...]


def capture(
    function: Callable[..., object] | nn.Module,
    spec: Spec,
    leaves: Sequence[torch.Tensor],
    region: Region,
    sizes: Sizes = Sizes.LEADING,
    dynamic_shapes: object = None,
) -> Captured:
    """Record ``function(*args, **kwargs)`` as it runs in *region*.

    Args:
        function: A module or a plain function.
        spec: The structure of ``(args, kwargs)``, from :func:`~fxamp.capture.structure.flatten`.
        leaves: The tensors of the call, real ones.
        region: The state of autocast around the call.
        sizes: Which sizes are symbolic, where the model's Python can take that.
        dynamic_shapes: The user's own choice of symbolic sizes, which goes before *sizes*.

    Raises:
        CaptureError: The call cannot be recorded faithfully; says why.
        PolicyError: Eager autocast refuses an operator of the call.
        ArgumentError: *dynamic_shapes* does not fit the arguments.
    """
    with pre_dispatch_lock, _quiet():
        attempts = [sizes] if sizes is Sizes.FIXED else [sizes, Sizes.FIXED]
        failures: list[Exception] = []
        for attempt in attempts:
            symbolic = _symbolic(function, spec, leaves, attempt, dynamic_shapes)
            try:
                return _capture(function, spec, leaves, region, symbolic)
            except PolicyError:
                raise
            except Exception as error:  # noqa: BLE001  whatever the user's Python raises on fake tensors
                failures.append(error)
        last = failures[-1]
        if isinstance(last, CaptureError):
            raise last
        lines = str(last).splitlines() or [""]
        raise CaptureError(f"{type(last).__name__}: {lines[0]}") from last


def _capture(
    function: Callable[..., object] | nn.Module,
    spec: Spec,
    leaves: Sequence[torch.Tensor],
    region: Region,
    symbolic: list[list[bool]],
) -> Captured:
    env = ObservedShapeEnv()
    fakes = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    places = places_of(function) if isinstance(function, nn.Module) else {}
    recorder = Recorder(fakes, region, lambda tensor: _place(places, tensor))
    env.refuse = recorder.refuse
    mirror = None
    if isinstance(function, nn.Module):
        mirror = Mirror(function, recorder.modules.append, lambda: _pop(recorder.modules))
        function = mirror.root
    reads = AttributeReads(mirror.origins if mirror else {})
    faked = [fake_input(fakes, leaf, sizes) for leaf, sizes in zip(leaves, symbolic, strict=True)]
    args, kwargs = unflatten(spec, faked)
    for fake, name in zip(faked, _input_names(function, args, kwargs), strict=True):
        recorder.add_input(fake, name)
    refuse = recorder.refuse
    try:
        with (
            randomness_refused(refuse),
            torchscript_refused(refuse),
            reads.noted(),
            recording(recorder, region),
        ):
            result = function(*args, **kwargs)
            recorder.raise_refusal()
            result_spec, outputs = flatten(result)
            rebound = mirror.rebindings() if mirror else []
            recorder.finish([*outputs, *(rebinding.tensor for rebinding in rebound)])
    finally:
        env.refuse = None  # torch's cache of dispatches by size keeps the environment, and no more, for good
    return Captured(
        graph=recorder.graph,
        region=region,
        fakes=fakes,
        env=env,
        sources=recorder.sources,
        result=result_spec,
        rebound=tuple(rebinding.place for rebinding in rebound),
        inputs=tuple(faked),
        grad=recorder.grad_at_entry,
        reads=reads.all(),
    )


@contextmanager
def recording(recorder: Recorder, region: Region) -> Iterator[None]:
    """Everything that is called inside is recorded by *recorder*, in *region*, on fake tensors."""
    with pre_dispatch_lock, ExitStack() as stack:
        stack.enter_context(region.context())
        if not recorder.concrete:
            stack.enter_context(recorder.fakes)
        stack.enter_context(enable_python_dispatcher())
        stack.enter_context(RecordingMode(recorder.record))
        yield


def _symbolic(
    function: Callable[..., object],
    spec: Spec,
    leaves: Sequence[torch.Tensor],
    sizes: Sizes,
    dynamic_shapes: object,
) -> list[list[bool]]:
    if sizes is Sizes.FIXED or dynamic_shapes is None:
        return [sizes.symbolic(leaf.dim()) for leaf in leaves]
    return symbolic_sizes(dynamic_shapes, function, *unflatten(spec, leaves))


def _input_names(function: Callable[..., object], args: Any, kwargs: Any) -> list[str]:
    """A name for every tensor: its parameter's, numbered where one argument holds several."""
    forward = function.forward if isinstance(function, nn.Module) else function
    try:
        named = list(inspect.signature(forward).bind(*args, **kwargs).arguments.items())
    except (TypeError, ValueError):
        named = [("args", args), ("kwargs", kwargs)]
    names = []
    for name, value in named:
        count = len(flatten(value)[1])
        names += [name] if count == 1 else [f"{name}_{index}" for index in range(count)]
    expected = len(flatten((args, kwargs))[1])
    return names if len(names) == expected else [f"input_{index}" for index in range(expected)]


def _keep(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def plain_saved_tensors() -> torch.autograd.graph.saved_tensors_hooks:
    """Keep hooks of the user's (a checkpoint around the call) away from the fake tensors."""
    return torch.autograd.graph.saved_tensors_hooks(_keep, _keep)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from logging each operator that a fake tensor refuses; the refusal is dealt with."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _place(places: dict[int, tuple[torch.Tensor, Place]], tensor: torch.Tensor) -> Place | None:
    found = places.get(id(tensor))
    return found[1] if found else None


def _pop(modules: list[str]) -> None:
    modules.pop()
