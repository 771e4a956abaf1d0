"""What is measured of a converted model: where its operators run, and how long capture takes.

These few functions are all that knows the inside of fxamp.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import fxamp.runtime.program
import fxamp.runtime.recording
import fxamp.runtime.runner
from fxamp.runtime.amp_module import AmpModule
from fxamp.runtime.undo import Undo

__all__ = ["Shares", "conditions_of", "counted", "timed_captures"]

# What eager autocast dispatches for a cast, and what autograd adds: no operators of the model.
_NOT_COUNTED = frozenset({torch.ops.aten._to_copy.default, torch.ops.aten.detach.default})


@dataclass
class Shares:
    """How many operators a call dispatched, inside of programs and outside of them."""

    inside: int = 0
    outside: int = 0
    names_outside: dict[str, int] = field(default_factory=dict)


class _Counter(TorchDispatchMode):
    def __init__(self, shares: Shares) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shares, self.depth, self.recording = shares, 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _NOT_COUNTED:
            pass
        elif self.depth:
            self.shares.inside += 1
        elif not self.recording:  # a call that takes a new way is recorded, on fake tensors, while it runs
            name = str(func.overloadpacket).removeprefix("aten.")
            self.shares.outside += 1
            self.shares.names_outside[name] = self.shares.names_outside.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(shares: Shares) -> Iterator[None]:
    """Count into *shares* the operators that are dispatched while this is open."""
    counter, module = _Counter(shares), fxamp.runtime.program
    run, save = module._run, Undo.save
    runner: Any = fxamp.runtime.runner
    recorder: Any = fxamp.runtime.recording

    def recording(function: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            counter.recording, before = True, counter.recording
            try:
                return function(*args, **kwargs)
            finally:
                counter.recording = before

        return called

    def counting(*args: Any) -> Any:
        counter.depth += 1
        try:
            return run(*args)
        finally:
            counter.depth -= 1

    def not_counting(*args: Any) -> None:  # copies that are no operators of the model
        with _disable_current_modes():
            save(*args)

    with (
        mock.patch.object(module, "_run", counting),
        mock.patch.object(Undo, "save", not_counting),
        mock.patch.object(recorder, "capture", recording(recorder.capture)),
        mock.patch.object(runner, "build_program", recording(runner.build_program)),
        counter,
    ):
        yield


@contextmanager
def timed_captures() -> Iterator[list[float]]:
    """Collect the seconds of each capture, also of those that fail."""
    seconds: list[float] = []
    runner: Any = fxamp.runtime.runner.Runner
    capture = runner._capture

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return capture(*args, **kwargs)
        finally:
            seconds.append(time.perf_counter() - start)

    with mock.patch.object(runner, "_capture", timed):
        yield seconds


def conditions_of(amp: AmpModule) -> dict[str, tuple[str, ...]]:
    """The conditions on sizes of each program, by the path of its module and its number."""
    return {
        f"{runner.path}#{index}": program.guard.conditions
        for runner in amp._runner.tree()
        for programs in list(runner.programs.values())
        for index, program in enumerate(programs)
    }
