"""How many casts a model of the zoo makes: converted and frozen, against eager autocast.

Casts are counted as they are dispatched, in a call of the same inputs on each side.  Those inside of a kernel
that consults autocast itself, and so stays in a region, are dispatched by both.

Large products are skipped (``skipped_kernels.py``) unless the model reads what they are needed for, or
something else goes wrong: then all is counted again in real calls.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

import fxamp
from fxamp.errors import FxampError
from tests.counts import Counts
from tests.zoo.check import TimeLimitError, seed_all, time_limit
from tests.zoo.entry import Entry, Inputs
from tests.zoo.skipped_kernels import Skipped, UnreadValues, skipped_kernels

__all__ = ["CastCounts", "count_casts", "try_to_count"]

DTYPE = torch.bfloat16


@dataclass
class CastCounts:
    """What came out for one model in one mode.

    Attributes:
        library: Of the model.
        name: Of the model.
        mode: ``eval`` or ``train``.
        status: ``counted``, ``eager fails``, ``build fails``, ``time``, or ``crash``, which may be due to the
            counting: it keeps kernels off their fast paths.
        eager: Casts of a call under eager autocast.
        eager_weights: Those of parameters among them.
        converted: Casts of a call of the converted model, from the second one on.
        frozen: Casts of a call of the frozen model, -1 where there is none (in training).
        frozen_weights: Those of its parameters among them.
        pieces: The modules that run eagerly.
        skipped: How many kernels the quick count has skipped in its calls.
        real: Why the calls that were counted are real ones, with all products; ``""`` if they are quick ones.
        error: What went wrong.
    """

    library: str
    name: str
    mode: str
    status: str = "counted"
    eager: int = 0
    eager_weights: int = 0
    converted: int = 0
    frozen: int = -1
    frozen_weights: int = 0
    pieces: tuple[str, ...] = ()
    skipped: int = 0
    real: str = ""
    error: str = ""

    @property
    def excess(self) -> tuple[str, ...]:
        """In which respects there are too many, for people."""
        frozen, eager = self.frozen - self.frozen_weights, self.eager - self.eager_weights
        bounds = {
            f"converted {self.converted}, eager {self.eager}": self.converted > self.eager,
            f"frozen {frozen} beside weights, eager {eager}": frozen > eager,
            f"frozen casts {self.frozen_weights} weights": self.frozen_weights > 0,
        }
        return tuple(text for text, exceeded in bounds.items() if exceeded)

    def as_dict(self) -> dict[str, Any]:
        """For a line of JSON."""
        return asdict(self)


def try_to_count(entry: Entry, mode: str, *, limit: int = 0, quick: bool = True) -> CastCounts:
    """Count; whatever is raised within *limit* seconds, or the limit itself, is told in the status.

    Args:
        entry: The model.
        mode: ``eval`` or ``train``.
        limit: For a quick count, and once more for one in real calls.
        quick: Whether to skip what nobody reads.
    """
    counts = _tried(entry, mode, limit, quick=quick)
    if not quick or not counts.skipped or (counts.status == "counted" and not counts.error):
        return counts
    why = counts.error or counts.status
    counts = _tried(entry, mode, limit, quick=False)
    counts.real = why
    return counts


def _tried(entry: Entry, mode: str, limit: int, *, quick: bool) -> CastCounts:
    counts = CastCounts(entry.library, entry.name, mode)
    try:
        with time_limit(limit):
            count_casts(entry, mode, counts, quick=quick)
    except TimeLimitError:
        counts.status = "time"
    except Exception:  # noqa: BLE001  whatever it is, it is the result
        counts.status = "crash" if counts.status == "counted" else counts.status
        counts.error = traceback.format_exc().splitlines()[-1]
    return counts


def count_casts(entry: Entry, mode: str, counts: CastCounts, *, quick: bool = True) -> None:
    """Fill in *counts* for *entry* in *mode*; a model that cannot be frozen is told as an error.

    Raises:
        ReadError: A *quick* count was to read what it had skipped.
    """
    training = mode == "train"
    counts.status = "build fails"
    seed_all(0)
    model = entry.build().train(training)
    inputs = entry.inputs(training)
    with torch.set_grad_enabled(training), skipped_kernels() if quick else nullcontext(Skipped()) as skipped:
        try:
            _fill_in(counts, model, inputs, UnreadValues(skipped) if quick else nullcontext())
        finally:
            counts.skipped = skipped.kernels


def _fill_in(
    counts: CastCounts, model: nn.Module, inputs: Inputs, unread: AbstractContextManager[object]
) -> None:
    """Count the calls of *model*; those under eager autocast are made in *unread*."""
    args, kwargs = inputs

    def call(function: Callable[..., Any]) -> None:
        seed_all(1)
        function(*copy.deepcopy(args), **copy.deepcopy(kwargs))

    counts.status = "eager fails"
    for _ in range(2):  # the first call may set attributes
        with unread, torch.autocast("cpu", DTYPE), Counts(_sized(model)) as eager:
            call(model)
    counts.status = "counted"
    counts.eager, counts.eager_weights = eager.casts, eager.weight_casts
    amp = fxamp.convert(model, device_type="cpu", dtype=DTYPE)
    counts.converted = _count(amp, call).casts
    counts.pieces = amp.eager_modules
    if model.training:
        return
    try:
        frozen = fxamp.freeze(amp)
        found = _count(frozen, call)
    except FxampError as error:
        counts.error = f"not frozen: {error}".splitlines()[0]
        return
    counts.frozen, counts.frozen_weights = found.casts, found.weight_casts


def _count(module: nn.Module, call: Callable[[Callable[..., Any]], None]) -> Counts:
    for _ in range(2):  # the first call of an eager piece is a survey
        call(module)
    counts = Counts(_sized(module))
    with counts:
        call(module)
    return counts


def _sized(module: nn.Module) -> list[torch.Tensor]:
    """The parameters that have elements: those without have no address."""
    return [weight for weight in module.parameters() if weight.numel()]
