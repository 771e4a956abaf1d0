"""``torch.amp.GradScaler``, which also tells what it did and does not sink in silence.

The scaling is torch's own, bit for bit: each method calls its parent's and then only looks.

=====================  ==========================  ============================================
what is added          answers                     what it costs
=====================  ==========================  ============================================
``last_step``          did it step? who had Inf?   nothing while steps are taken
``min_scale=1.0``      a floor for the scale       one asynchronous ``clamp_`` an update
``min_scale=None``     one warning below 1         one asynchronous copy an update in doubt
=====================  ==========================  ============================================

An update is in doubt unless the host saw every step since the last one taken.  Nothing here waits
for a device, except to name parameters: after a skipped step, and when ``last_step`` is read.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdRef, WeakTensorKeyDictionary

__all__ = ["GradScaler", "LastStep", "StepOutcome"]

_NAMES_IN_A_WARNING = 5


@dataclass(frozen=True)
class StepOutcome:
    """What became of one ``scaler.step(optimizer)``.

    Attributes:
        stepped: Whether the parameters were updated.
        nonfinite: Names of the parameters whose gradients had an Inf or a NaN, in the optimizer's
            order; ``()`` where it stepped, or where those gradients were gone before anyone asked.
    """

    stepped: bool
    nonfinite: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False, repr=False)
class LastStep(Mapping[Optimizer, StepOutcome]):
    """The outcome of every optimizer's latest step, by the optimizer's identity; frozen.

    It keeps no optimizer alive: one that is garbage is no longer in it.
    """

    _entries: tuple[tuple[weakref.ref[Optimizer], StepOutcome], ...]

    def __getitem__(self, optimizer: Optimizer) -> StepOutcome:
        for alive, outcome in self._entries:
            if alive() is optimizer:
                return outcome
        raise KeyError(f"this scaler has made no step of this {type(optimizer).__name__}")

    def __iter__(self) -> Iterator[Optimizer]:
        return (optimizer for alive, _ in self._entries if (optimizer := alive()) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        lines = (f"{type(optimizer).__name__}: {self[optimizer]}" for optimizer in self)
        return f"LastStep({', '.join(lines)})"


class GradScaler(torch.amp.GradScaler):
    """Dynamic loss scaling: torch's, with a report of each step and a guard below.

    Scaling, unscaling, stepping, errors, ``state_dict`` and pickling are ``torch.amp.GradScaler``'s.
    Pickles and deep copies know neither the last step nor the given names.

    Args:
        device: ``"cuda"`` or ``"cpu"``; ``"cuda"`` without a GPU warns and disables.
        init_scale: The first loss scale, a factor without unit.
        growth_factor: Multiplies the scale after *growth_interval* good updates; above 1.
        backoff_factor: Multiplies the scale after an Inf or a NaN; below 1.
        growth_interval: Updates in a row without an Inf or a NaN before the scale grows.
        enabled: Whether to scale at all; if not, ``step`` just steps.
        min_scale: A positive floor, rounded to float32: no ``update`` leaves the scale below it, one
            that sets it by hand included.  ``None`` is torch's: the scale may sink to 0, but
            the first time that an update is seen to take it below 1, a ``UserWarning`` names the
            parameters that were not finite (on CUDA that may come an update late, since nothing
            waits).

    Raises:
        ValueError: *min_scale* is not a positive finite number.
        AssertionError: *growth_factor* or *backoff_factor* is on the wrong side of 1.

    Source:
        ``torch/amp/grad_scaler.py``.

    Example:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> sgd, scaler = torch.optim.SGD([("weight", weight)]), GradScaler("cpu")
        >>> scaler.scale((weight * math.inf).sum()).backward()
        >>> scaler.step(sgd), scaler.last_step[sgd]
        (None, StepOutcome(stepped=False, nonfinite=('weight',)))
    """

    _names: WeakTensorKeyDictionary
    _outcomes: dict[int, _Entry]
    _suspects: tuple[str, ...]
    _watch: _ScaleWatch | None

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,  # noqa: FBT001, FBT002 - its place in torch's signature
        *,
        min_scale: float | None = None,
    ) -> None:
        if min_scale is not None and not 0.0 < min_scale < math.inf:
            raise ValueError(f"min_scale must be positive and finite, or None for none; not {min_scale!r}")
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._min_scale = min_scale
        self._forget()

    @property
    def last_step(self) -> LastStep:
        """Whether each optimizer's latest ``step()`` stepped, and if not, which gradients stopped it.

        Of a fused optimizer only the device knows.  The first reading after its step therefore
        waits for the device, and can name parameters only until ``zero_grad`` or the next backward
        pass; read it before.  Names are those that the gradients have when ``step`` tests them:
        ``clip_grad_norm_`` in between spreads a NaN, though not an Inf, over all of them.
        """
        self._outcomes = {key: entry.settle(self._names) for key, entry in self._outcomes.items()}
        settled = self._outcomes.values()
        return LastStep(tuple((alive, known) for alive, known in settled if isinstance(known, StepOutcome)))

    def name_parameters(self, named_parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Give parameters the names that ``last_step`` and the warning use; keeps none alive.

        An optimizer that was itself built from ``named_parameters`` already has names, which win.
        A parameter without either is ``"group 0, parameter 3"``.

        Args:
            named_parameters: Pairs of name and parameter, as ``model.named_parameters()`` yields.
        """
        for name, parameter in named_parameters:
            self._names[parameter] = name

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale if that is still to do, then step unless a gradient has an Inf or a NaN.

        Args:
            optimizer: The optimizer to step; ``last_step[optimizer]`` then tells whether it did.
            args: For ``optimizer.step``.
            kwargs: For ``optimizer.step``.

        Returns:
            What ``optimizer.step`` returned; ``None`` where it was not called.

        Raises:
            RuntimeError: A second step since the last update, or a ``closure`` by keyword.
            AssertionError: Nothing was scaled before, or no parameter has a gradient.
        """
        result = super().step(optimizer, *args, **kwargs)
        if not self._enabled:
            self._remember(optimizer, StepOutcome(stepped=True))
        elif getattr(optimizer, "_step_supports_amp_scaling", False):
            # update() adds the found_inf of several optimizers up in place, in the first of them.
            found_inf = tuple(each.clone() for each in self._found_inf_per_device(optimizer).values())
            self._remember(optimizer, _Unread(found_inf, _witness(optimizer)))
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale: back after an Inf or a NaN, up after enough updates without one.

        Args:
            new_scale: The scale to set instead, a float or a one-element tensor.

        Raises:
            AssertionError: No gradient was tested since the last update, nothing was scaled
                before, or *new_scale* is not on the scaler's device, not one element, or needs grad.
        """
        in_doubt = self._enabled and not all(map(_was_taken, self._per_optimizer_states.values()))
        super().update(new_scale)
        if not self._enabled or self._scale is None:
            return
        if self._min_scale is not None:
            self._scale.clamp_(min=self._min_scale)
        elif new_scale is not None:
            self._restart_watch()
        elif self._watch is not None and self._watch.sees_a_fall(self._scale, moved=in_doubt):
            self._warn_of_low_scale(self._watch.seen)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what ``state_dict()`` returned; neither *min_scale* nor names are in it.

        Args:
            state_dict: The state of an enabled scaler, torch's or this one's.

        Raises:
            RuntimeError: It is empty, as a disabled scaler's is.
        """
        super().load_state_dict(state_dict)
        self._restart_watch()

    def _maybe_opt_step(
        self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        observed = _Observed(optimizer)
        result = super()._maybe_opt_step(cast(Optimizer, observed), optimizer_state, *args, **kwargs)
        names = () if observed.stepped else _nonfinite(optimizer, self._names)
        self._suspects = names or self._suspects
        self._remember(optimizer, StepOutcome(observed.stepped, names))
        optimizer_state["taken"] = observed.stepped  # gone with the rest of the state in update()
        return result

    def _remember(self, optimizer: Optimizer, outcome: StepOutcome | _Unread) -> None:
        try:
            entry = _Entry(weakref.ref(optimizer), outcome)
        except TypeError:  # __slots__ without __weakref__: torch steps such an object too
            return
        alive = {key: old for key, old in self._outcomes.items() if old.optimizer() is not None}
        self._outcomes = {**alive, id(optimizer): entry}

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        super()._lazy_init_scale_growth_tracker(dev)
        self._restart_watch()

    def _restart_watch(self) -> None:
        """A scale set by hand has not fallen, however low it is."""
        if self._watch is not None and self._scale is not None:
            self._watch = _ScaleWatch()
            self._watch.sees_a_fall(self._scale, moved=True)

    def _warn_of_low_scale(self, scale: float) -> None:
        self._watch = None
        names = [name for outcome in self.last_step.values() for name in outcome.nonfinite] or self._suspects
        more = len(names) - _NAMES_IN_A_WARNING
        listed = ", ".join(names[:_NAMES_IN_A_WARNING]) + (f" and {more} more" if more > 0 else "")
        warnings.warn(
            f"the loss scale fell to {scale:g}, below 1, and gradients still have Inf or NaN"
            f"{': last those of ' if names else ''}{listed}\n"
            "  no scale repairs that; find the operation which makes them, or keep a floor:  "
            "GradScaler(..., min_scale=1.0)",
            stacklevel=3,
        )

    def __getstate__(self) -> dict[str, Any]:
        transient = {"_names", "_outcomes", "_suspects", "_watch"}
        return {name: value for name, value in super().__getstate__().items() if name not in transient}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

    def _forget(self) -> None:
        self._names = WeakTensorKeyDictionary()
        self._outcomes = {}
        self._suspects = ()
        self._watch = _ScaleWatch() if self._enabled and self._min_scale is None else None


class _Observed:
    """An optimizer's ``step`` for torch to call or not, and whether it did."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.stepped = False

    def step(self, *args: Any, **kwargs: Any) -> Any:
        self.stepped = True
        return self._optimizer.step(*args, **kwargs)


class _Unread(NamedTuple):
    """What a fused step leaves: copies of ``found_inf``, one a device, and the gradients' witness."""

    found_inf: tuple[Tensor, ...]
    witness: tuple[WeakIdRef, int] | None


class _Entry(NamedTuple):
    """One optimizer's latest outcome."""

    optimizer: weakref.ref[Optimizer]
    outcome: StepOutcome | _Unread

    def settle(self, names: Mapping[Tensor, str]) -> _Entry:
        """Itself with its outcome read off the device, if it was not yet; waits for the device."""
        optimizer = self.optimizer()
        if isinstance(self.outcome, StepOutcome) or optimizer is None:
            return self
        stepped = not any(each.item() for each in self.outcome.found_inf)
        unchanged = not stepped and self.outcome.witness == _witness(optimizer)
        return self._replace(outcome=StepOutcome(stepped, _nonfinite(optimizer, names) if unchanged else ()))


class _ScaleWatch:
    """Sees a scale fall below 1, from copies that reach the host whenever they do."""

    def __init__(self) -> None:
        self.seen = math.nan  # nothing is less than it: the first value that is seen has not fallen
        self._copy: tuple[Tensor, Callable[[], bool]] | None = None

    def sees_a_fall(self, scale: Tensor, *, moved: bool) -> bool:
        """Whether a copy has arrived that is below 1 and below the one before; sends one if *moved*."""
        if scale.is_cuda and torch.cuda.is_current_stream_capturing():
            return False  # asking for an event would break the capture
        fell_before = self._look()
        if moved and self._copy is None:
            self._copy = _send_to_host(scale)
        return self._look() or fell_before

    def _look(self) -> bool:
        if self._copy is None or not self._copy[1]():
            return False
        before, self.seen, self._copy = self.seen, self._copy[0].item(), None
        return self.seen < 1.0 and self.seen < before


def _send_to_host(scale: Tensor) -> tuple[Tensor, Callable[[], bool]]:
    """A copy of *scale* on the host, and whether it has arrived; waits for nothing."""
    if not scale.is_cuda:
        return scale, lambda: True
    copy = torch.empty((), dtype=scale.dtype, pin_memory=True)
    copy.copy_(scale, non_blocking=True)
    arrival = torch.cuda.Event()
    arrival.record(torch.cuda.current_stream(scale.device))
    return copy, arrival.query


def _was_taken(optimizer_state: Mapping[str, Any]) -> bool:
    return bool(optimizer_state.get("taken", False))


def _nonfinite(optimizer: Optimizer, names: Mapping[Tensor, str]) -> tuple[str, ...]:
    """The names of the parameters whose gradients have an Inf or a NaN; waits for the device once."""
    named = list(_named_gradients(optimizer, names))
    if not named:
        return ()
    with torch.no_grad():
        finite = [_stored(gradient).isfinite().all() for _, gradient in named]
        verdicts: list[bool] = torch.stack([each.to(finite[0].device) for each in finite]).tolist()
    return tuple(name for (name, _), verdict in zip(named, verdicts, strict=True) if not verdict)


def _named_gradients(optimizer: Optimizer, names: Mapping[Tensor, str]) -> Iterator[tuple[str, Tensor]]:
    for index, group in enumerate(getattr(optimizer, "param_groups", ())):
        own = group.get("param_names", ())
        for place, parameter in enumerate(group["params"]):
            if parameter.grad is not None:
                given = names.get(parameter, f"group {index}, parameter {place}")
                yield own[place] if place < len(own) else given, parameter.grad


def _stored(gradient: Tensor) -> Tensor:
    """The values that this process holds of a sparse or a sharded gradient."""
    if gradient.is_sparse:
        return gradient._values()
    to_local: Callable[[], Tensor] | None = getattr(gradient, "to_local", None)
    return gradient if to_local is None else to_local()


def _witness(optimizer: Optimizer) -> tuple[WeakIdRef, int] | None:
    """The first gradient and its version: as long as it is equal, no backward or zeroing came by."""
    for _, gradient in _named_gradients(optimizer, {}):
        return WeakIdRef(gradient), gradient._version
    return None
