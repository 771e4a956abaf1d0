"""Which region a compiled graph is called in, and the policy that holds there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxamp.ir.regions import DEVICE_TYPES, Region, observe_region
from fxamp.policy import Policy

__all__ = ["Surroundings", "is_inside_a_region"]


@dataclass(frozen=True)
class Surroundings:
    """The user's choice for calls outside of any region.

    Attributes:
        policy: Which operators are cast there; ``None`` casts none.
    """

    policy: Policy | None

    def region(self, args: Sequence[Any]) -> Region:
        """The state of autocast that a call with *args* is to be run in: the user's region, if there is one.

        A region that is there but switched off counts, as it does in eager autocast.
        """
        enabled = [device for device in DEVICE_TYPES if torch.is_autocast_enabled(device)]
        if self.policy is not None and not enabled and not is_inside_a_region():
            return Region(self.policy.device_type, enabled=True, dtype=self.policy.low)
        present = [arg.device.type for arg in args if isinstance(arg, torch.Tensor)]
        affected = [device for device in enabled if device in present]
        return observe_region((affected or enabled or present or ["cpu"])[0])

    def policy_in(self, region: Region) -> Policy:
        """The user's policy where it is one for *region*; else torch's own."""
        own = self.policy
        if own is not None and (own.device_type, own.low) == (region.device_type, region.dtype):
            return own
        return Policy.native(region.device_type, region.dtype)


def is_inside_a_region() -> bool:
    """Whether a region of autocast is around, switched on or off."""
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth > 1
