"""Answers from real values while a recording waits: new symbols for the sizes and numbers in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fxamp.capture.interlude import Interlude
from fxamp.capture.segments import Captured, Walk
from fxamp.capture.structure import Spec
from fxamp.capture.symbols import fake_input, symbolic_number

__all__ = ["Pause"]


@dataclass
class Pause:
    """Where a recorder gets real values.

    Attributes:
        walk: The real call.
        interlude: The state of the thread in which it runs.
        fakes: The mode of the recording's fake tensors.
        fixed: Whether sizes and numbers must come back, instead of being symbols.
    """

    walk: Walk
    interlude: Interlude
    fakes: FakeTensorMode
    fixed: bool
    _numbers: int = 0

    def expected(self) -> tuple[tuple[int, str], ...] | None:
        """See :meth:`Walk.expected`."""
        return self.walk.expected()

    def results_of(self, segment: Captured) -> tuple[Spec, Sequence[Any]]:
        """Run *segment* and its operator for real; give the results as fake tensors and symbols."""
        with self.interlude.real():
            spec, results = self.walk.advance(segment)
            return spec, [self._symbolic(result) for result in results]

    def _symbolic(self, real: Any) -> Any:
        if isinstance(real, torch.Tensor):
            return fake_input(self.fakes, real, [not self.fixed] * real.dim())
        env: Any = self.fakes.shape_env
        self._numbers += 1
        number = symbolic_number(env, real, f"number_{self._numbers}")
        if type(real) is bool:
            number.truth = True
        return number

    def answer(self, value: Any) -> Any:
        """What the waiting Python gets for *value*: truth values as they are, with a guard."""
        if isinstance(value, torch.SymInt):
            if hasattr(value, "truth"):
                return bool(value != 0)
            return int(value) if self.fixed else value
        if isinstance(value, torch.SymFloat):
            return float(value) if self.fixed else value
        return value
