"""The runner of a frozen module: its programs read rounded weights, and its module tree is out of reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fxamp.capture.segments import Captured
from fxamp.capture.symbols import Sizes
from fxamp.ir.regions import Region
from fxamp.runtime.build_program import build_program
from fxamp.runtime.frozen_weights import FrozenWeights
from fxamp.runtime.options import Options
from fxamp.runtime.program import Program
from fxamp.runtime.runner import Runner
from fxamp.runtime.traceable import Traceable, traceable
from fxamp.runtime.watch import ModuleWatch, SealedWatch

__all__ = ["FrozenRunner"]


class FrozenRunner(Runner):
    """Runs a module, or a child of one, whose weights are frozen.

    No gradient ever meets in a cast, so it does not matter which eager code uses which weight: no surveys.

    Args:
        function: The module; nobody else has it.
        path: Its dotted path in the frozen module.
        options: How the model was converted.
        weights: The rounded copies.
        parent: The runner of the eager piece that it is in.

    Attributes:
        traceables: The programs that Dynamo can trace through.
    """

    _surveys = False

    def __init__(
        self,
        function: nn.Module,
        path: str,
        options: Options,
        weights: FrozenWeights,
        parent: Runner | None = None,
    ) -> None:
        self._weights = weights
        self.traceables: list[Traceable] = []
        super().__init__(function, path, options, parent)

    def _new_watch(self) -> ModuleWatch | None:
        assert isinstance(self.function, nn.Module)
        return SealedWatch(self.function)

    def _below(self, child: nn.Module, path: str) -> Runner:
        return FrozenRunner(child, path, self.options, self._weights, self)

    def _program(
        self, captured: Captured, sizes: Sizes, keep: Callable[..., torch.Tensor] | None, *, alone: bool
    ) -> Program:
        policy = self.options.policy
        return build_program(captured, self.function, policy, sizes, keep, self._weights, alone=alone)

    def _run_eagerly(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        self._weights.expect_eager_code()
        self._leave_out_unsettled()
        return super()._run_eagerly(key, args, kwargs, region)

    def _keep(self, key: Any, program: Program) -> None:
        super()._keep(key, program)
        found = None if self.path else traceable(program, key)
        if found is not None:
            self.traceables = [found, *self.traceables]
        self._leave_out_unsettled()

    def _leave_out_unsettled(self) -> None:
        """Compiled code reads tensors as they are: what is to be computed anew in each call is not for it."""
        if not all(each.settled() for each in self.traceables):
            self.traceables = [each for each in self.traceables if each.settled()]
