"""Capture: run a callable's Python once on fake tensors and keep what reached the dispatcher.

``capture`` needs nothing of the user's but the callable and the arguments of one call.  Afterwards
modules, buffers and random states are as before.  A program is first captured with symbolic sizes
(``Sizes`` says which); where the model's Python cannot take them, once more with those of the example.
"""

from __future__ import annotations

import inspect
import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fxamp.capture.attribute_reads import AttributeReads
from fxamp.capture.checkpoints import checkpoints_recorded
from fxamp.capture.dtype_reads import dtype_reads_noted
from fxamp.capture.dynamic_shapes import symbolic_sizes
from fxamp.capture.functions import functions_recorded
from fxamp.capture.interlude import Interlude
from fxamp.capture.left_behind import replace_left_behind
from fxamp.capture.locks import pre_dispatch_lock
from fxamp.capture.mirror import Mirror
from fxamp.capture.numbers import python_numbers
from fxamp.capture.pause import Pause
from fxamp.capture.policy_dispatch import PolicyRegion
from fxamp.capture.recorder import Recorder
from fxamp.capture.recording_mode import RecordingMode
from fxamp.capture.refusals import RandomnessRefused, torchscript_refused
from fxamp.capture.segments import Captured, NeedsValuesError, Walk
from fxamp.capture.sources import Place, places_of
from fxamp.capture.stand_in_layouts import layouts_recorded
from fxamp.capture.structure import Spec, contents, flatten, mutable_objects, strangers, unflatten
from fxamp.capture.symbols import ObservedShapeEnv, Sizes, fake_input
from fxamp.capture.table_regions import table_regions
from fxamp.capture.tracer_checks import tracer_unseen
from fxamp.errors import CaptureError, PolicyError
from fxamp.ir.regions import Region
from fxamp.policy.scopes import PlacedPolicy

_LOGGERS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")

__all__ = ["Captured", "capture", "plain_saved_tensors", "recording"]


def capture(
    function: Callable[..., object] | nn.Module,
    spec: Spec,
    leaves: Sequence[torch.Tensor],
    region: Region,
    sizes: Sizes = Sizes.LEADING,
    dynamic_shapes: object = None,
    walk: Walk | None = None,
    placed: PlacedPolicy | None = None,
    *,
    whole_loops: bool = False,
) -> Captured:
    """Record ``function(*args, **kwargs)`` as it runs in *region*.

    Args:
        function: A module or a plain function.
        spec: The structure of ``(args, kwargs)``, from :func:`~fxamp.capture.structure.flatten`.
        leaves: The tensors of the call, real ones.
        region: The state of autocast around the call.
        sizes: Which sizes are symbolic, where the model's Python can take that.
        dynamic_shapes: The user's own choice of symbolic sizes, which goes before *sizes*.
        walk: The real call, for a model that reads values of tensors; it gets all segments but the last.
        placed: The policy that operators are called under, if it is not torch's own.
        whole_loops: Whether an operator that loops over time is one node, for sequences of any length;
            else its steps are the nodes.

    Returns:
        The last segment of the call; mostly it is the only one.

    Raises:
        CaptureError: The call cannot be recorded faithfully; says why.
        PolicyError: Eager autocast refuses an operator of the call.
        ArgumentError: *dynamic_shapes* does not fit the arguments.
    """
    with pre_dispatch_lock, _quiet():
        following = walk is not None and walk.following
        attempts = [_Attempt(sizes, walk if following else None, whole_loops)]
        while True:
            symbolic = _symbolic(function, spec, leaves, attempts[-1].sizes, dynamic_shapes)
            try:
                return _capture(function, spec, leaves, region, symbolic, attempts[-1], placed)
            except PolicyError:
                raise
            except Exception as error:  # noqa: BLE001  whatever the user's Python raises on fake tensors
                failure = error
            again = None if following else attempts[-1].after(failure, walk)
            if again is None and isinstance(failure, CaptureError):
                raise failure
            if again is None:
                raise _capture_error(failure) from failure
            attempts.append(again)


@dataclass(frozen=True)
class _Attempt:
    """A way to record a call: without its values and with symbolic sizes, where the model's Python allows."""

    sizes: Sizes
    walk: Walk | None
    whole_loops: bool

    def after(self, failure: Exception, walk: Walk | None) -> _Attempt | None:
        """What to try next."""
        about_values = isinstance(failure, (NeedsValuesError, GuardOnDataDependentSymNode))
        if about_values and self.walk is None:
            return replace(self, walk=walk) if walk is not None else None
        about_sizes = self.sizes is not Sizes.FIXED and not isinstance(failure, CaptureError)
        return replace(self, sizes=Sizes.FIXED) if about_sizes else None


def _capture_error(failure: Exception) -> CaptureError:
    lines = str(failure).splitlines() or [""]
    kind = NeedsValuesError if isinstance(failure, GuardOnDataDependentSymNode) else CaptureError
    return kind(f"{type(failure).__name__}: {lines[0]}")


def _capture(
    function: Callable[..., object] | nn.Module,
    spec: Spec,
    leaves: Sequence[torch.Tensor],
    region: Region,
    symbolic: list[list[bool]],
    attempt: _Attempt,
    placed: PlacedPolicy | None,
) -> Captured:
    walk = attempt.walk
    env = ObservedShapeEnv(allow_scalar_outputs=walk is None, allow_dynamic_output_shape_ops=walk is None)
    fakes = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    places = places_of(function) if isinstance(function, nn.Module) else {}
    interlude = Interlude()
    pause = None
    if walk is not None:
        walk.begin(attempt.sizes)
        pause = Pause(walk, interlude, fakes, fixed=attempt.sizes is Sizes.FIXED)
    with plain_saved_tensors():
        recorder = Recorder(
            fakes,
            region,
            lambda tensor: _place(places, tensor),
            pause=pause,
            placed=placed,
            whole_loops=attempt.whole_loops,
        )
        if placed is not None and isinstance(function, nn.Module):
            recorder.scopes = placed.scopes_below(function)
        env.refuse = recorder.refuse
        try:
            captured = _record(recorder, function, spec, leaves, symbolic, interlude)
        except Exception as error:
            traceback.clear_frames(error.__traceback__)
            _leave_no_fakes(recorder, leaves)
            if isinstance(error, (CaptureError, PolicyError)):
                raise
            recorder.raise_refusal()  # Python went on after it
            if env.reads:  # Python could not do with a number that is not known
                raise NeedsValuesError(f"{type(error).__name__}: {error}") from error
            raise
        else:
            _leave_no_fakes(recorder, leaves)
            return captured
        finally:
            env.refuse = None  # torch's cache of dispatches by size keeps the environment, and no more


def _leave_no_fakes(recorder: Recorder, leaves: Sequence[torch.Tensor]) -> None:
    """The recording is over: nothing that the model's Python keeps may be a fake tensor of it."""

    def around(region: Region) -> AbstractContextManager[object]:
        return region.context() if recorder.by is None else PolicyRegion(region, recorder.by.placed).context()

    replace_left_behind(recorder.graph, recorder.region, recorder.let_go(leaves), around)


def _record(
    recorder: Recorder,
    function: Callable[..., object] | nn.Module,
    spec: Spec,
    leaves: Sequence[torch.Tensor],
    symbolic: list[list[bool]],
    interlude: Interlude,
) -> Captured:
    mirror = None
    if isinstance(function, nn.Module):
        mirror = Mirror(function, recorder.modules.append, lambda: _pop(recorder.modules))
        function = mirror.root
    reads = AttributeReads(mirror.origins if mirror else {})
    recorder.new_reads, recorder.unnoted = reads.new, reads.suspended
    randomness = RandomnessRefused(recorder.refuse)
    interlude.suspend += [randomness.suspended, reads.suspended, recorder.closed]
    faked = [fake_input(recorder.fakes, leaf, sizes) for leaf, sizes in zip(leaves, symbolic, strict=True)]
    args, kwargs = unflatten(spec, faked)
    objects = mutable_objects((args, kwargs))
    held = [contents(value) for value in objects]
    for fake, name in zip(faked, _input_names(function, args, kwargs), strict=True):
        recorder.add_input(fake, name)
    recorder.begin_with(faked)
    with ExitStack() as stack:
        for context in (
            randomness,
            torchscript_refused(recorder.refuse),
            tracer_unseen(),
            functions_recorded(recorder),
            checkpoints_recorded(recorder),
            python_numbers(),
            reads.noted(),
            _kept_as_they_are(strangers((args, kwargs))),
            nullcontext() if recorder.by is None else dtype_reads_noted(recorder.by.dtypes_read),
            recording(recorder, recorder.region),
        ):
            stack.enter_context(context)
        result = function(*args, **kwargs)
        recorder.raise_refusal()
        changed = _changed(objects, held)
        result_spec, outputs = flatten((result, [contents(objects[index]) for index in changed]), objects)
        rebound = mirror.rebindings() if mirror else []
        recorder.finish([*outputs, *(rebinding.tensor for rebinding in rebound)])
    return replace(
        recorder.segment(),
        result=result_spec if changed else result_spec[1][0],
        changed=changed,
        rebound=tuple(rebinding.place for rebinding in rebound),
    )


@contextmanager
def _kept_as_they_are(objects: list[object]) -> Iterator[None]:
    """Put back the attributes of *objects*, the user's own; a call that changes them is refused."""
    before = [dict(vars(value)) for value in objects]
    try:
        yield
        for value, attributes in zip(objects, before, strict=True):
            now = vars(value)
            if list(now) != list(attributes) or any(now[name] is not attributes[name] for name in now):
                raise CaptureError(f"the call changes an argument of class {type(value).__qualname__}")
    finally:
        for value, attributes in zip(objects, before, strict=True):
            vars(value).clear()
            vars(value).update(attributes)


def _changed(objects: list[object], held: Sequence[Sequence[tuple[Any, Any]]]) -> tuple[int, ...]:
    """Which of *objects*, which held *held*, now hold something else."""
    return tuple(
        index
        for index, (value, before) in enumerate(zip(objects, held, strict=True))
        if len(now := contents(value)) != len(before)
        or any(
            key != old_key or new is not old for (key, new), (old_key, old) in zip(now, before, strict=True)
        )
    )


@contextmanager
def recording(recorder: Recorder, region: Region) -> Iterator[None]:
    """Everything that is called inside is recorded by *recorder*, in *region*, on fake tensors."""
    with pre_dispatch_lock, ExitStack() as stack:
        if recorder.by is not None:
            stack.enter_context(table_regions(recorder.by.policy))
            stack.enter_context(layouts_recorded(recorder.by.policy))
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


def _drop(tensor: torch.Tensor) -> None:
    return None


def plain_saved_tensors() -> torch.autograd.graph.saved_tensors_hooks:
    """Keep hooks of the user's (a checkpoint around the call) away from the fake tensors.

    No gradient is ever taken of those, so nothing is kept for it.
    """
    return torch.autograd.graph.saved_tensors_hooks(_drop, _drop)  # type: ignore[arg-type]


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
