"""The check of one model of the zoo: a converted copy against eager autocast, bit for bit.

Three calls are compared, each with the same seeds on both sides: one that captures; one with other values,
which shows whether a value was taken for a constant; and one of other sizes.  Two eager copies run beside
the converted one.  Where they differ from each other, no comparison can be made, and the tensor is named.
"""

from __future__ import annotations

import copy
import gc
import random
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fxamp
from fxamp.runtime.amp_module import AmpModule
from tests.models import equal
from tests.zoo.entry import Entry, Inputs
from tests.zoo.leaves import named_tensors
from tests.zoo.measure import Shares, conditions_of, counted, timed_captures

__all__ = ["Result", "TimeLimitError", "check", "seed_all", "time_limit"]

DTYPE = torch.bfloat16


class TimeLimitError(BaseException):
    """A model took too long; no ``Exception``, so that no library takes it for its own."""


@dataclass
class Result:
    """What came out for one model in one mode.

    Attributes:
        library: Of the model.
        name: Of the model.
        mode: ``eval`` or ``train``.
        status: ``equal``, ``differs``, ``crash``, ``time``, ``eager fails`` or ``build fails``.
        differs: What differs, by call.
        unstable: What eager autocast itself does not reproduce.
        eager: The pieces that run eagerly: path and reason.
        inside: Operators that one call dispatches inside of programs.
        outside: Operators that one call dispatches outside of programs.
        names_outside: The latter by name.
        graphs: How many programs were captured by two calls of the same sizes.
        sizes: Other sizes: ``same program``, ``recaptured``, ``differs``, ``eager fails``, ``crash``,
            ``time`` or ``-``.
        guards: The conditions on sizes of the programs that did not serve other sizes.
        capture: Seconds of capture.
        seconds: In all.
        error: The traceback of a crash.
    """

    library: str
    name: str
    mode: str
    status: str = "equal"
    differs: list[str] = field(default_factory=list)
    unstable: list[str] = field(default_factory=list)
    eager: list[tuple[str, str]] = field(default_factory=list)
    inside: int = 0
    outside: int = 0
    names_outside: dict[str, int] = field(default_factory=dict)
    graphs: int = 0
    sizes: str = "-"
    guards: list[str] = field(default_factory=list)
    capture: float = 0.0
    seconds: float = 0.0
    error: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For a line of JSON."""
        return asdict(self)


def seed_all(seed: int) -> None:
    """Seed the three generators that models draw from."""
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002  models use the global generator
    random.seed(seed)


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise :class:`TimeLimitError` once *seconds* are over; 0 is no limit."""

    def over(signum: int, frame: FrameType | None) -> None:
        raise TimeLimitError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)  # again and again: in a weakref's callback it is ignored
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def check(entry: Entry, mode: str, *, limit: int = 0) -> Result:
    """Compare *entry* with eager autocast in *mode*; never raises an ``Exception``."""
    result = Result(entry.library, entry.name, mode)
    start = time.perf_counter()
    try:
        with time_limit(limit):
            _Check(entry, mode, result).run()
    except TimeLimitError:
        result.error = _traceback()
        if result.sizes != "time":
            result.status = "time"
    except Exception:  # noqa: BLE001  whatever it is, it is the result
        result.status, result.error = "crash", _traceback()
    result.seconds = round(time.perf_counter() - start, 2)
    gc.collect()
    return result


class _EagerFailsError(Exception):
    """Eager autocast cannot run the model, so there is nothing to be equal to."""


@dataclass
class _Side:
    """One copy of the model, and how it is called."""

    model: nn.Module
    call: Callable[..., Any]
    scope: Callable[[], AbstractContextManager[Any]]

    def run(self, inputs: Callable[[], Inputs], seed: int, *, backward: bool) -> dict[str, Any]:
        """Outputs, gradients, buffers and random state of one call, by name."""
        seed_all(seed)
        args, kwargs = inputs()
        seed_all(seed + 1)
        self.model.zero_grad(set_to_none=True)
        with self.scope():
            out = self.call(*args, **kwargs)
        outputs = named_tensors(out)
        if backward:
            _loss(out, outputs).backward()
        found: dict[str, Any] = {f"output {name}": leaf.detach() for name, leaf in outputs.items()}
        found |= {f"gradient {name}": p.grad for name, p in self.model.named_parameters()}
        found |= {f"buffer {name}": buffer.clone() for name, buffer in self.model.named_buffers()}
        found["random state of torch"] = torch.get_rng_state()
        found["random state of numpy"] = np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002
        found["random state of Python"] = random.getstate()
        return found


def _loss(out: Any, leaves: dict[str, Tensor]) -> Tensor:
    """The model's own loss, or the weighted sum of all outputs that have a gradient."""
    own = getattr(out, "loss", None)
    if isinstance(own, Tensor) and own.requires_grad and own.dim() == 0:
        return own
    terms = []
    for leaf in leaves.values():
        if not leaf.requires_grad:
            continue
        real = torch.view_as_real(leaf) if leaf.is_complex() else leaf
        real = (real.to_dense() if real.layout is not torch.strided else real).float()
        weights = torch.linspace(0.5, 1.5, real.numel()).view(real.shape)
        terms.append((real * weights).sum())
    if not terms:
        raise _EagerFailsError("no output has a gradient")
    return torch.stack(terms).sum()


class _Check:
    """The calls of one check, in order."""

    def __init__(self, entry: Entry, mode: str, result: Result) -> None:
        self.entry, self.mode, self.result = entry, mode, result
        self.training = mode == "train"
        self.pending: list[Callable[[], dict[str, Any]]] = []  # calls that the twin has not made yet

    def run(self) -> None:
        """All of it; *result* is filled on the way."""
        try:
            theirs, twin, ours = self._copies()
        except Exception:  # noqa: BLE001  a list may be wrong about a library's version
            self.result.status, self.result.error = "build fails", _traceback()
            return
        amp = fxamp.convert(ours, device_type="cpu", dtype=DTYPE)
        self.theirs, self.twin = _Side(theirs, theirs, _autocast), _Side(twin, twin, _autocast)
        self.ours = _Side(ours, amp, nullcontext)
        with torch.set_grad_enabled(self.training):
            try:
                if not self._first_calls(amp):
                    return
                self._count(amp)
            finally:  # after a crash too: what runs eagerly is often why
                self.result.eager = [(piece.path, piece.reason) for piece in amp.report().eager]
            if not self.result.differs:
                self._other_sizes(amp)

    def _first_calls(self, amp: AmpModule) -> bool:
        """Two calls of the same sizes; whether eager autocast runs the model at all."""
        try:
            expected = self._call(self.theirs, self._inputs, 1)
            again = self._call(self.twin, self._inputs, 1)
        except Exception:  # noqa: BLE001  whatever it is, it is eager's
            self.result.status, self.result.error = "eager fails", _traceback()
            return False
        self._note_unstable(expected, again)
        with timed_captures() as seconds:
            self._compare("first call", self._call(self.ours, self._inputs, 1), expected)
            del expected, again
            self._step("other values", self._inputs, 3)
        self.result.capture = round(sum(seconds), 3)
        self.result.graphs = len(amp.graph_modules)
        return True

    def _count(self, amp: AmpModule) -> None:
        """Count the operators of one more call, which the eager sides make too: it may write to buffers."""
        self._forward(self.theirs, nullcontext())
        self.pending.append(partial(self._forward, self.twin, nullcontext()))
        shares = Shares()
        with suppress(RuntimeError):  # the mode keeps kernels off their fast paths
            self._forward(self.ours, counted(shares))
        self.result.inside, self.result.outside = shares.inside, shares.outside
        self.result.names_outside = shares.names_outside

    def _other_sizes(self, amp: AmpModule) -> None:
        if self.entry.resized is None:
            return
        resized = self.entry.resized
        before = conditions_of(amp)
        self.result.sizes = "time"
        try:
            self._step("other sizes", lambda: resized(self.training), 7)
        except _EagerFailsError:
            self.result.sizes = "eager fails"
            return
        except Exception:
            self.result.sizes = "crash"
            raise
        recaptured = len(conditions_of(amp)) > len(before)
        self.result.sizes = "recaptured" if recaptured else "same program"
        if self.result.differs:
            self.result.sizes = "differs"
        if recaptured:
            self.result.guards = sorted({text for texts in before.values() for text in texts})

    def _inputs(self) -> Inputs:
        return self.entry.inputs(self.training)

    def _forward(self, side: _Side, scope: AbstractContextManager[Any]) -> dict[str, Any]:
        seed_all(5)
        args, kwargs = self._inputs()
        with side.scope(), scope:
            side.call(*args, **kwargs)
        return {}

    def _call(self, side: _Side, inputs: Callable[[], Inputs], seed: int) -> dict[str, Any]:
        return side.run(inputs, seed, backward=self.training)

    def _step(self, what: str, inputs: Callable[[], Inputs], seed: int) -> None:
        """One more call of both sides; of the twin too if they differ."""
        try:
            expected = self._call(self.theirs, inputs, seed)
        except Exception as error:
            raise _EagerFailsError from error
        self.pending.append(partial(self._call, self.twin, inputs, seed))
        found = self._call(self.ours, inputs, seed)
        if _differences(found, expected, self.result.unstable):
            for earlier in self.pending:
                again = earlier()
            self.pending = []
            self._note_unstable(expected, again)
        self._compare(what, found, expected)

    def _note_unstable(self, one: dict[str, Any], other: dict[str, Any]) -> None:
        self.result.unstable += _differences(one, other, self.result.unstable)

    def _compare(self, what: str, found: dict[str, Any], expected: dict[str, Any]) -> None:
        different = _differences(found, expected, self.result.unstable)
        if different:
            self.result.status = "differs"
            self.result.differs += [f"{what}: {name}" for name in different]

    def _copies(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        seed_all(0)
        model = self.entry.build().train(self.training)
        try:
            return copy.deepcopy(model), copy.deepcopy(model), model
        except Exception:  # noqa: BLE001  not every model can be copied; all can be built again
            models = [model]
            for _ in range(2):
                seed_all(0)
                models.append(self.entry.build().train(self.training))
            return models[1], models[2], models[0]


def _autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=DTYPE)


def _differences(one: dict[str, Any], other: dict[str, Any], known: list[str]) -> list[str]:
    """The names under which *one* and *other* differ, but for the *known* ones."""
    skipped = set(known)
    different = [
        name
        for name, value in one.items()
        if name in other and name not in skipped and not _alike(value, other[name])
    ]
    missing = [f"{name} (on one side only)" for name in sorted(one.keys() ^ other.keys())]
    return different + [name for name in missing if name not in skipped]


def _alike(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return bool(one == other)
    if type(one) is not type(other) or one.layout is not other.layout:  # a fake tensor may have got out
        return False
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    return equal(one, other)


def _traceback() -> str:
    lines = traceback.format_exc().splitlines()
    return "\n".join([*lines[-14:]])
