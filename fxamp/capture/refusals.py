"""What the recorder cannot see, so that a call which does it must be refused.

Python's and numpy's random numbers would be drawn once and replayed for ever.  TorchScript runs its own
interpreter, whose operators the recorder would see one by one although eager runs them fused, with
gradients of its own.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from fxamp.capture.replaced import replaced
from fxamp.errors import CaptureError

__all__ = ["RandomnessRefused", "torchscript_refused"]


class RandomnessRefused:
    """A context that raises ``CaptureError`` at its end if the random state moved, and puts it back anyway.

    Random operators draw nothing from torch's generator on fake tensors, so there only ``manual_seed`` and
    its like are seen.  Those that put the state back (``fork_rng``) call :attr:`refuse` at once.
    """

    def __init__(self, refuse: Callable[[CaptureError], None]) -> None:
        self.refuse = refuse

    def __enter__(self) -> None:
        self._before = _random_states()
        self._stack = ExitStack()
        self._stack.enter_context(_seeding_refused(self.refuse))

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._stack.close()
        try:
            if kind is None:
                self._compare()
        finally:
            self._restore()

    def _compare(self) -> None:
        python, numpy, own = _random_states()
        if python != self._before[0] or not _same_state(numpy, self._before[1]):
            raise CaptureError("forward draws from Python's or numpy's random numbers")
        if not torch.equal(own, self._before[2]):
            raise CaptureError("forward sets torch's random state")

    def _restore(self) -> None:
        python, numpy, own = self._before
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_rng_state(own)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """What runs inside may draw."""
        self._stack.close()
        self._compare()
        try:
            yield
        finally:
            self._before = _random_states()
            self._stack.enter_context(_seeding_refused(self.refuse))


def _random_states() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002


def _same_state(one: Any, other: Any) -> bool:
    return bool(one[2] == other[2] and np.array_equal(one[1], other[1]))


class _Untouchable:
    """Stands for torch's default generator: the thread that made it may not read or set its state."""

    def __init__(self, generator: torch.Generator, refuse: Callable[[CaptureError], None]) -> None:
        self._generator, self._refuse, self._thread = generator, refuse, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if threading.get_ident() == self._thread:
            error = CaptureError(f"forward reads or sets torch's random state ({name})")
            self._refuse(error)
            raise error
        return getattr(self._generator, name)


@contextmanager
def _seeding_refused(refuse: Callable[[CaptureError], None]) -> Iterator[None]:
    names: dict[str, Any] = vars(torch.random)
    stand_in = _Untouchable(names["default_generator"], refuse)
    with replaced(names, "default_generator", stand_in):
        yield


@contextmanager
def torchscript_refused(refuse: Callable[[CaptureError], None]) -> Iterator[None]:
    """Call ``refuse(error)`` and raise *error* where this thread calls scripted code; others may."""
    here = threading.get_ident()
    classes: tuple[Any, ...] = (torch._C.ScriptFunction, torch._C.ScriptMethod)
    originals = [cls.__call__ for cls in classes]

    def guarded(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == here:
                error = CaptureError(f"forward calls TorchScript code ({self.name})")
                refuse(error)
                raise error
            return original(self, *args, **kwargs)

        return call

    for cls, original in zip(classes, originals, strict=True):
        cls.__call__ = guarded(original)
    try:
        yield
    finally:
        for cls, original in zip(classes, originals, strict=True):
            cls.__call__ = original
