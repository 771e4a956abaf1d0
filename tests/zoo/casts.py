"""How many casts a model of the zoo makes: converted and frozen, against eager autocast.

Casts are counted as they are dispatched, in a call of the same inputs on each side.  Those inside of a kernel
that consults autocast itself, and so stays in a region, are dispatched by both.  Where a call is one graph,
no value decides what is dispatched, and the dear kernels may be left out.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

import fxamp
from fxamp.errors import FxampError
from tests.counts import Counts, Hollow
from tests.zoo.check import TimeLimitError, seed_all, time_limit
from tests.zoo.entry import Entry

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


def try_to_count(entry: Entry, mode: str, *, limit: int = 0, hollow: bool = False) -> CastCounts:
    """Count; whatever is raised within *limit* seconds, or the limit itself, is told in the status."""
    counts = CastCounts(entry.library, entry.name, mode)
    try:
        with time_limit(limit):
            count_casts(entry, mode, counts, hollow=hollow)
    except TimeLimitError:
        counts.status = "time"
    except Exception:  # noqa: BLE001  whatever it is, it is the result
        counts.status = "crash" if counts.status == "counted" else counts.status
        counts.error = traceback.format_exc().splitlines()[-1]
    return counts


def count_casts(entry: Entry, mode: str, counts: CastCounts, *, hollow: bool = False) -> None:
    """Fill in *counts* for *entry* in *mode*; a model that cannot be frozen is told as an error.

    With *hollow* products and convolutions are not computed where a call is one graph.
    """
    training = mode == "train"
    counts.status = "build fails"
    seed_all(0)
    model = entry.build().train(training)
    args, kwargs = entry.inputs(training)

    def call(function: Callable[..., Any]) -> None:
        seed_all(1)
        function(*copy.deepcopy(args), **copy.deepcopy(kwargs))

    with torch.set_grad_enabled(training), ExitStack() as stack:
        if hollow and _is_one_graph(model, args, kwargs):
            stack.enter_context(Hollow())
        counts.status = "eager fails"
        for _ in range(2):  # the first call may set attributes
            with torch.autocast("cpu", DTYPE), Counts(_sized(model)) as eager:
                call(model)
        counts.status = "counted"
        counts.eager, counts.eager_weights = eager.casts, eager.weight_casts
        amp = fxamp.convert(model, device_type="cpu", dtype=DTYPE)
        counts.converted = _count(amp, call).casts
        counts.pieces = amp.eager_modules
        if training:
            return
        try:
            frozen = fxamp.freeze(amp)
            found = _count(frozen, call)
        except FxampError as error:
            counts.error = f"not frozen: {error}".splitlines()[0]
            return
        counts.frozen, counts.frozen_weights = found.casts, found.weight_casts


def _is_one_graph(model: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether a call reads no value, and none of its parts runs eagerly."""
    amp = fxamp.convert(model, device_type="cpu", dtype=DTYPE)
    try:
        amp.capture(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    except FxampError:
        return False
    return amp.eager_modules == () and len(amp.graph_modules) == 1


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
