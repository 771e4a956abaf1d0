"""The region that a module's own Python runs in: torch's, or one that casts as the policy says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from fxamp.capture.policy_dispatch import PolicyRegion
from fxamp.ir.regions import RealRegion, Region
from fxamp.policy.scopes import PlacedPolicy
from fxamp.runtime.cast_scope import keep_cast
from fxamp.runtime.findings import Findings

__all__ = ["region_of_eager_code", "region_of_methods"]


def region_of_eager_code(
    region: Region, placed: PlacedPolicy | None, function: object, path: str, findings: Findings
) -> AbstractContextManager[object]:
    """What the Python of one module runs in.

    Args:
        region: The region of the call.
        placed: The policy on the model, if it is not torch's own.
        function: The module, or a function.
        path: Its dotted path, ``""`` for the model; below the model the region is there already.
        findings: Where the overrides are noted that found a call that they mean.
    """
    if placed is not None:
        return _under_policy(region, placed, function, path, findings)
    return nullcontext() if path else region.context()


@contextmanager
def _under_policy(
    region: Region, placed: PlacedPolicy, function: object, path: str, findings: Findings
) -> Iterator[None]:
    scopes = placed.scopes.get(id(function), frozenset())
    with PolicyRegion(region, placed, (path,), scopes, keep_cast).context() as dispatch:
        yield
    findings.meant |= dispatch.meant


def region_of_methods(region: Region, placed: PlacedPolicy | None) -> RealRegion:
    """What methods of the model other than ``forward`` run in."""
    return region if placed is None else PolicyRegion(region, placed, keep=keep_cast)
