"""What is compared: a model, and the two ways to run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxamp.capture.symbols import Sizes
from fxamp.compare.inputs import Item
from fxamp.errors import ArgumentError
from fxamp.ir.regions import Region
from fxamp.policy import Policy
from fxamp.runtime.amp_module import AmpModule, again, policy_of, source_of
from fxamp.runtime.options import Options
from fxamp.runtime.stand_in import device_type_of

__all__ = ["Subject", "subject_of"]


@dataclass(frozen=True)
class Subject:
    """The two ways to run a model: by eager autocast, and converted.

    Attributes:
        source: The model as it is.
        policy: Which operators are cast.
        amp: The model converted, anew for this comparison.
        converted: Whether that is what the operators are looked at in; else it is eager autocast.
    """

    source: nn.Module | Callable[..., Any]
    policy: Policy
    amp: AmpModule
    converted: bool

    def region(self) -> Region:
        """The state of eager autocast that the policy stands for."""
        return Region(self.policy.device_type, enabled=True, dtype=self.policy.low)

    def eager(self, item: Item) -> Any:
        """The result by eager autocast."""
        with self.region().context():
            return self.source(*item.args, **item.kwargs)

    def rewritten(self, item: Item) -> Any:
        """The result of the converted model."""
        return self.amp(*item.args, **item.kwargs)

    @property
    def has_eager_twin(self) -> bool:
        """Whether eager autocast here decides by the same table."""
        return self.policy.table == self.policy.device_type


def subject_of(
    model: nn.Module | Callable[..., Any],
    device_type: str | None,
    dtype: torch.dtype | None,
    policy: Policy | None,
    *,
    once: bool = False,
) -> Subject:
    """What *model* is to be compared as.

    Args:
        model: A module, a function, or a converted one.
        device_type: As for ``convert``.
        dtype: Likewise.
        policy: Likewise.
        once: Whether it is called for one input alone, so that capture need not keep sizes symbolic.

    Raises:
        ArgumentError: It is no model, or is converted already and something else is asked for.
    """
    if type(model) is AmpModule:
        if device_type is not None or dtype is not None or policy is not None:
            raise ArgumentError(
                "a converted model has its policy\n  give the model that it was converted from"
            )
        return Subject(source_of(model), policy_of(model), again(model), converted=True)
    if not callable(model):
        raise ArgumentError(f"compare takes an nn.Module or a function, not {type(model).__name__}")
    if policy is None:
        policy = Policy.native(device_type or device_type_of(model) or "cpu", dtype)
    sizes = Sizes.FIXED if once else Sizes.LEADING
    amp = AmpModule(model, Options(policy, sizes, whole_loops=False))
    policy = policy_of(amp)  # acting on the tensors of the device that the model is on
    return Subject(model, policy, amp, converted=not policy.is_torchs_own)
