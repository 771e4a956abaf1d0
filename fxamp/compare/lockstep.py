"""Run a model and its reference in lockstep, operator by operator.

A dispatch mode above autocast sees each operator as the model calls it.  It runs

1. the operator on the reference's tensors, without autocast, in float32 or float64,
2. the operator on the reference's tensors rounded to the dtypes that the run has: what it does to right
   inputs is the error that it *adds*,
3. the operator as it was called, which is the run itself, under whatever autocast is on,

compares, and lets go of 2.  Both sides free their tensors when the model lets go of its own, so the most
that is held is what two runs hold, and the inputs and results of one operator.  Python is run once: what it
decides from values or dtypes it decides for both, from the run's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary

from fxamp.capture.locks import pre_dispatch_lock
from fxamp.capture.recording_mode import RecordingMode
from fxamp.compare.detectors import Call, inspect, inspect_source, inspect_state
from fxamp.compare.gradients import Gradients
from fxamp.compare.kinds import Finding, Kind
from fxamp.compare.random_state import RandomState
from fxamp.compare.rows import Count
from fxamp.compare.shadows import Shadow, Shadows, Storages, map_tensors, tensors_in, widen
from fxamp.compare.sites import Site, Sites
from fxamp.compare.statistics import Tally
from fxamp.ir.operators import written_arguments
from fxamp.ir.regions import no_autocast
from fxamp.ir.where import Where
from fxamp.runtime.undo import Undo

__all__ = ["Lockstep"]

_QUERIES = ("aten::sym_", "aten::is_", "aten::dim", "aten::numel", "prim::", "aten::item",
            "aten::_local_scalar_dense", "aten::requires_grad_", "aten::retain_grad")  # fmt: skip
_CASTS = ("aten::to.", "aten::_to_copy", "aten::type_as")
_NO_ERROR = frozenset({"aten::detach", "aten::alias", "aten::lift_fresh", "aten::lift"})


class Lockstep:
    """Counts what two runs in lockstep show.

    Args:
        model: Whose modules have paths.
        reference: float32 or float64.
        names: What the model's tensors are called, by ``id``.
        low: The low precision dtype, in whose last places errors are counted.
        gradients: Compares the gradients, if they are wanted.
        local: Whether the errors that operators add are wanted.

    Attributes:
        counts: What was counted, by site, in the order of first calls.
        input: The index of the input that is being run.
        order: Operators so far, over all inputs.
        first: The first result that is not finite where the reference is: its row, and the input's index.
        substituted: Whether the run raised, and went on with what the reference had.
        cut: The first operator whose result has a gradient that the reference does not follow.
        apart: Why the reference had to start again from the run's values, by site.
    """

    def __init__(
        self,
        model: object,
        reference: torch.dtype,
        names: dict[int, str],
        low: torch.dtype,
        *,
        gradients: Gradients | None = None,
        local: bool = True,
    ) -> None:
        self._sites = Sites(model)
        self._reference, self._names, self._gradients, self._local = reference, names, gradients, local
        self._low, self._undo = low, Undo()
        self.shadows = self._new_shadows()
        self._own = Storages()
        self._looked_at = WeakTensorKeyDictionary()
        self.counts: dict[Site, Count] = {}
        self.input = self.order = 0
        self.first: tuple[Count, int] | None = None
        self.apart: dict[Site, str] = {}
        self.cut: Site | None = None
        self.substituted = False
        self._latest_lost, self._latest_noise = False, 0.0

    def _new_shadows(self) -> Shadows:
        return Shadows(self._reference, grad=self._gradients is not None, names=self._names)

    def begin(self, index: int, undo: Undo) -> None:
        """Another input comes; *undo* keeps what its run writes to tensors from outside."""
        self.input, self._undo = index, undo
        self.shadows = self._new_shadows()
        self._own = Storages()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Operators that are called inside are run in lockstep."""
        with pre_dispatch_lock, enable_python_dispatcher(), RecordingMode(self._record):
            yield

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The reference's tensor in the place of *tensor*."""
        return self.shadows.of(tensor).value

    def leaf_count(self, name: str) -> Count:
        """What counts the gradients of the parameter *name*."""
        site = Site("parameter", Where(name))
        return self.counts.setdefault(site, Count(site, len(self.counts)))

    # --- one operator -------------------------------------------------------------------------------

    def _record(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(isinstance(tensor, FakeTensor) for tensor in tensors_in((args, kwargs))):
            return func(*args, **kwargs)  # something is being captured
        with torch._C._DisablePythonDispatcher():
            if func.name().startswith(_QUERIES):
                return func(*args, **kwargs)
            return self._run(func, args, kwargs)

    def _run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.order += 1
        inputs = tensors_in((args, kwargs))
        written = written_arguments(func, args, kwargs)
        for tensor in written:
            self._before_write(tensor)
        sources = [self.shadows.of(tensor) for tensor in inputs]
        state = RandomState.of(func, args, kwargs)
        prepared = self._locals(func, args, kwargs, sources, written) if written else None
        expected, failure = self._reference_result(func, args, kwargs, state)
        alone = self._local_result(func, args, kwargs, sources, written, state, prepared, expected)
        call = Call(func, args, kwargs, inputs, sources, self.input, self.order)
        result = self._own_result(func, args, kwargs, expected, failure, call)
        self._compare(call, result, expected, failure, state, alone, writes=bool(written))
        for tensor in written:
            self._after_write(call, tensor)
        return result

    def _reference_result(
        self, func: OpOverload, args: Any, kwargs: Any, state: RandomState
    ) -> tuple[Any, Exception | None]:
        if state.draws:
            return None, None
        new_args, new_kwargs = self._referred((args, kwargs))
        try:
            with no_autocast():
                result = func(*new_args, **new_kwargs)
        except Exception as error:  # noqa: BLE001  the run decides whether the operator may be called
            state.rewind()
            return None, error
        state.rewind()
        return map_tensors(result, self._widen), None

    def _referred(self, value: Any) -> Any:
        """*value* as the reference has it: shadows, and dtypes that are wide enough."""
        if isinstance(value, torch.Tensor):
            return self.shadows.of(value).value
        if isinstance(value, torch.dtype):
            return widen(value, self._reference)
        if isinstance(value, (list, tuple)):
            items = [self._referred(item) for item in value]
            return items if isinstance(value, list) else tuple(items)
        if isinstance(value, dict):
            return {key: self._referred(item) for key, item in value.items()}
        return value

    def _widen(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = widen(tensor.dtype, self._reference)
        return tensor if tensor.dtype is dtype else tensor.to(dtype)

    # --- fed the reference's inputs -----------------------------------------------------------------

    def _locals(
        self, func: OpOverload, args: Any, kwargs: Any, sources: list[Shadow], written: list[torch.Tensor]
    ) -> tuple[Any, Any] | None:
        """The arguments of the call with the reference's values in the dtypes of the run."""
        if not self._local or not any(t.is_floating_point() for t in tensors_in((args, kwargs))):
            return None
        targets = {id(tensor) for tensor in written}
        known = iter(sources)

        def local(tensor: torch.Tensor) -> torch.Tensor:
            value = next(known).value
            if value is tensor and id(tensor) not in targets:
                return tensor
            if isinstance(tensor, torch.nn.Parameter) and not targets:
                return tensor  # its cast is in autocast's cache
            value = value.detach()
            if id(tensor) in targets:
                return value.to(tensor.dtype, copy=True)
            return value.to(tensor.dtype)

        with no_autocast():
            found: tuple[Any, Any] = map_tensors((args, kwargs), local)
        return found

    def _local_result(
        self,
        func: OpOverload,
        args: Any,
        kwargs: Any,
        sources: list[Shadow],
        written: list[torch.Tensor],
        state: RandomState,
        prepared: tuple[Any, Any] | None,
        expected: Any,
    ) -> Any:
        """The results of the operator on the reference's inputs; ``None`` where that tells nothing."""
        if not self._local or state.draws or not _adds_error(func, args, kwargs, expected, sources):
            return None
        arguments = prepared if written else self._locals(func, args, kwargs, sources, written)
        if arguments is None:
            return None
        try:
            with torch.no_grad():
                return func(*arguments[0], **arguments[1])
        except RuntimeError:
            return None
        finally:
            state.rewind()

    # --- the run itself -----------------------------------------------------------------------------

    def _own_result(
        self, func: OpOverload, args: Any, kwargs: Any, expected: Any, failure: Exception | None, call: Call
    ) -> Any:
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            # only where the values are at fault does the reference know better
            if failure is not None or expected is None or "cannot be converted to type" not in str(error):
                raise
            self.substituted = True
            text = str(error).splitlines()[0]
            self._count(call).find(Finding(Kind.RAISES, text, self.input, self.order))
            dtypes = [tensor.dtype for tensor in call.inputs if tensor.is_floating_point()]
            result = map_tensors(expected, lambda value: _clamped(value.detach(), dtypes[0]))
            written = written_arguments(func, args, kwargs)
            if written:
                with torch.no_grad():
                    written[0].copy_(result)
                return written[0]
            return result

    def _before_write(self, tensor: torch.Tensor) -> None:
        self.shadows.separate(tensor)
        if tensor not in self._own:
            self._undo.save([tensor])

    def _after_write(self, call: Call, tensor: torch.Tensor) -> None:
        shadow = self.shadows.of(tensor)
        name = self.shadows.names.get(id(tensor))
        if name and tensor.is_floating_point():
            inspect_state(call, self._count(call), tensor, shadow.value, name)

    def _count(self, call: Call) -> Count:
        numbers = tuple(value for value in call.args if isinstance(value, (int, float)))
        site = self._sites.now(call.func.name(), numbers)
        found = self.counts.get(site)
        if found is None:
            found = self.counts[site] = Count(site, len(self.counts))
        return found

    # --- the two against each other -----------------------------------------------------------------

    def _compare(
        self,
        call: Call,
        result: Any,
        expected: Any,
        failure: Exception | None,
        state: RandomState,
        alone: Any,
        *,
        writes: bool,
    ) -> None:
        results = tensors_in(result)
        given = {id(tensor) for tensor in call.inputs}
        if not results or (not writes and all(id(tensor) in given for tensor in results)):
            return  # a cast to the dtype that is there already gives back its argument
        memory = [tensor for tensor in call.inputs if tensor.layout is torch.strided]
        if all(_is_view(tensor, memory) for tensor in results) and failure is None:
            self._pass_on(call, results, tensors_in(expected))
            self._count_sources(call, None)
            return
        count = self._count(call)
        count.calls += 1
        self._count_sources(call, count)
        values = self._paired(call, results, expected, failure, state)
        others = tensors_in(alone) if alone is not None else [None] * len(results)
        for tensor, (value, fresh), other in zip(results, values, others, strict=False):
            self._own.add(tensor)
            shadow = Shadow(value, count)
            if not fresh and tensor.dtype.is_floating_point:
                shadow.bad = self._measure(call, count, tensor, value, other, state)
                came_in = next((source.vanished for source in call.sources if source.vanished), None)
                shadow.vanished = came_in or (count if self._latest_lost else None)
                shadow.noise = self._latest_noise
                if _widens(call, tensor):
                    shadow.producer = call.sources[0].producer or count
            self.shadows.put(tensor, shadow)
            if self._gradients is not None and tensor.requires_grad and value.requires_grad and not fresh:
                self._gradients.pair(count, tensor, value)
            elif self._gradients is not None and tensor.requires_grad and not fresh:
                self.cut = self.cut or count.site

    def _pass_on(self, call: Call, results: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        """Give views the shadows that are views likewise."""
        origins = [self.shadows.of(tensor) for tensor in call.inputs]
        bad = any(origin.bad for origin in origins)
        producer = next((origin.producer for origin in origins if origin.producer), None)
        vanished = next((origin.vanished for origin in origins if origin.vanished), None)
        for tensor, value in zip(results, values, strict=False):
            if self.shadows.known(tensor) is None:
                foreign = all(origin.foreign for origin in origins)
                noise = max((origin.noise for origin in origins), default=0.0)
                self.shadows.put(tensor, Shadow(value, producer, bad, foreign, vanished, noise))

    def _count_sources(self, call: Call, count: Count | None) -> None:
        """Look at tensors from outside when they are first used."""
        for tensor, shadow in zip(call.inputs, call.sources, strict=True):
            if shadow.foreign and tensor.is_floating_point() and tensor not in self._looked_at:
                self._looked_at[tensor] = True
                name = self.shadows.names.get(id(tensor), "")
                inspect_source(call, count or self._count(call), tensor, name)

    def _paired(
        self,
        call: Call,
        results: list[torch.Tensor],
        expected: Any,
        failure: Exception | None,
        state: RandomState,
    ) -> list[tuple[torch.Tensor, bool]]:
        """For each result the reference's, and whether that is only a copy of the result."""
        values = tensors_in(expected)
        paired: list[tuple[torch.Tensor, bool]] = []
        for index, tensor in enumerate(results):
            value = values[index] if index < len(values) else None
            if value is not None and value.shape == tensor.shape and value.layout == tensor.layout:
                if any(value is shadow.value for shadow in call.sources) and not any(
                    tensor is given for given in call.inputs
                ):
                    self.shadows.share(value)
                paired.append((value, False))
                continue
            if not state.draws:
                why = f"{type(failure).__name__}: {failure}" if failure is not None else "another shape"
                self.apart.setdefault(self._sites.now(call.func.name()), why.splitlines()[0])
            fresh = tensor.detach().to(widen(tensor.dtype, self._reference), copy=True)
            known = self.shadows.known(tensor)
            if known is not None and known.value.shape == fresh.shape:  # written in place
                with torch.no_grad():
                    known.value.copy_(fresh)
                fresh = known.value
            paired.append((fresh, True))
        return paired

    def _measure(
        self,
        call: Call,
        count: Count,
        tensor: torch.Tensor,
        value: torch.Tensor,
        other: torch.Tensor | None,
        state: RandomState,
    ) -> bool:
        if tensor.layout is not torch.strided or tensor.numel() == 0:
            return False
        count.dtype = tensor.dtype.abbr
        arrived, alone = Tally(self._low), None
        arrived.add(tensor, value)
        if other is not None and other.shape == value.shape:
            alone = Tally()
            alone.add(other, value)
            if alone.bad and not _fit(call):
                alone = None  # what overflows is on its way in, and is counted where it was made
        elif not call.sources and not state.seeded:
            alone = arrived  # made from nothing
        inspect(call, count, tensor, value, arrived, alone)
        self._latest_lost, self._latest_noise = 2 * arrived.underflow > arrived.nonzero, arrived.noise
        count.arrived.merge(arrived)
        if alone is not None:
            count.local.merge(alone)
        if arrived.bad and self.first is None:
            self.first = count, self.input
        return bool(arrived.bad or arrived.reference_nan or arrived.reference_inf)


def _adds_error(func: OpOverload, args: Any, kwargs: Any, expected: Any, sources: list[Shadow]) -> bool:
    """Whether the operator computes anything: a view does not, and a cast to a wider dtype is exact."""
    values = tensors_in(expected)
    if not any(value.is_floating_point() for value in values) or func.name() in _NO_ERROR:
        return False
    if func.name().startswith(_CASTS):
        tensors = tensors_in((args, kwargs))
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)]
        target = given[0] if given else tensors[-1].dtype
        return target.itemsize <= tensors[0].dtype.itemsize or not tensors[0].is_floating_point()
    if func._schema.is_mutable:
        return True
    given_values = [source.value for source in sources]
    return not all(_is_view(value, given_values) for value in values)


def _widens(call: Call, result: torch.Tensor) -> bool:
    """Whether the operator is an exact cast: what is wrong with its result is its argument's fault."""
    cast = call.func.name().startswith(_CASTS) and call.inputs[0].is_floating_point()
    return cast and result.dtype.itemsize > call.inputs[0].dtype.itemsize


def _fit(call: Call) -> bool:
    """Whether the reference's inputs are in the range of the dtypes that the run has them in."""
    return all(
        float(torch.nan_to_num(source.value.detach(), 0, 0, 0).abs().max()) <= torch.finfo(tensor.dtype).max
        for tensor, source in zip(call.inputs, call.sources, strict=True)
        if tensor.is_floating_point() and source.value.numel() and source.value.layout is torch.strided
    )


def _is_view(tensor: torch.Tensor, given: list[torch.Tensor]) -> bool:
    """Whether *tensor* shares memory with one of *given* that it is not itself."""
    if tensor.layout is not torch.strided:
        return False
    if any(tensor is other for other in given):
        return False
    storage = tensor.untyped_storage()._cdata
    return any(other.layout is torch.strided and other.untyped_storage()._cdata == storage for other in given)


def _clamped(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    limits = torch.finfo(dtype)
    return value.clamp(limits.min, limits.max).to(dtype)
