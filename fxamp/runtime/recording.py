"""A call as it is recorded under a policy, with what that shows of the policy's overrides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from fxamp.capture.capture import capture
from fxamp.capture.segments import Captured
from fxamp.capture.structure import Spec
from fxamp.capture.symbols import Sizes
from fxamp.errors import CaptureError, PolicyError
from fxamp.ir.regions import Region
from fxamp.policy.scopes import PlacedPolicy, place
from fxamp.runtime.findings import Findings
from fxamp.runtime.walk import Walk

__all__ = ["Recording"]


@dataclass(frozen=True)
class Recording:
    """What is recorded: a call of a module.

    Attributes:
        function: The module, or a function.
        spec: The structure of the arguments.
        leaves: Their tensors.
        region: What the call runs in.
        dynamic_shapes: The user's own choice of symbolic sizes; of the converted model itself only.
        whole_loops: Whether an operator that loops over time is one node.
    """

    function: Callable[..., Any]
    spec: Spec
    leaves: list[torch.Tensor]
    region: Region
    dynamic_shapes: Any
    whole_loops: bool

    def make(
        self, sizes: Sizes, walk: Walk | None, placed: PlacedPolicy | None, findings: Findings
    ) -> Captured:
        """Record the call, and note in *findings* what it shows of the policy *placed* on the model."""
        captured = self._captured(sizes, walk, placed)
        findings.add(captured, self._without_overrides(sizes, placed))
        return captured

    def _captured(self, sizes: Sizes, walk: Walk | None, placed: PlacedPolicy | None) -> Captured:
        return capture(
            self.function,
            self.spec,
            self.leaves,
            self.region,
            sizes,
            self.dynamic_shapes,
            walk,
            placed,
            whole_loops=self.whole_loops,
        )

    def _without_overrides(self, sizes: Sizes, placed: PlacedPolicy | None) -> Captured | None:
        """The same call under the policy's table alone; ``None`` where that cannot be."""
        if placed is None or not placed.policy.overrides:
            return None
        bare = place(replace(placed.policy, overrides=()), self.function)
        try:
            return self._captured(sizes, None, bare)
        except (CaptureError, PolicyError):
            return None
