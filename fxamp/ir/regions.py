"""The autocast state that a node runs in.

A captured graph marks each change of state with an ``enter_region`` node; the pass ``flatten-regions``
moves the state onto the nodes (``node.meta["region"]``) and erases the marks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

__all__ = [
    "DEVICE_TYPES",
    "RealRegion",
    "Region",
    "enter_region",
    "no_autocast",
    "observe_region",
    "run_in_region",
    "runner_in_region",
]

_is_enabled, _dtype_of = torch.is_autocast_enabled, torch.get_autocast_dtype  # as torch has them

DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps", "mtia")
"""Those that have autocast."""


@dataclass(frozen=True, repr=False)
class Region:
    """One state of autocast for one device type.

    Attributes:
        device_type: Whose autocast it is: ``"cpu"``, ``"cuda"``, ...
        enabled: Whether operators are cast at all.
        dtype: The low precision dtype.
        cache: Whether the casts of leaves are kept.
    """

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache: bool = True
    is_region: ClassVar[bool] = True

    def context(self) -> torch.autocast:
        """A context manager that puts eager autocast into this state."""
        return torch.autocast(
            self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=self.cache
        )

    def __repr__(self) -> str:
        state = "on" if self.enabled else "off"
        return f"autocast_{self.device_type}_{self.dtype.abbr}_{state}{'' if self.cache else '_uncached'}"

    def __str__(self) -> str:
        state = self.dtype.abbr if self.enabled else "off"
        return f"autocast({self.device_type}, {state}{'' if self.cache else ', no cache'})"


class RealRegion(Protocol):
    """A state of autocast that real code can be run in."""

    def context(self) -> AbstractContextManager[object]:
        """A context manager that puts this thread into it."""


def observe_region(device_type: str) -> Region:
    """The state of autocast for *device_type* on this thread, now."""
    return Region(
        device_type,
        _is_enabled(device_type),
        _dtype_of(device_type),
        torch.is_autocast_cache_enabled(),
    )


def enter_region(region: Region) -> None:
    """The mark of a change of state in a captured graph; it does nothing when run."""


def run_in_region(region: RealRegion, operator: object, *args: object, **kwargs: object) -> object:
    """Run an operator whose kernel consults autocast itself inside a real region."""
    with region.context():
        return operator(*args, **kwargs)  # type: ignore[operator]


def runner_in_region(region: Region, operator: Callable[..., Any]) -> Callable[..., Any]:
    """*operator* as :func:`run_in_region` runs it; what ``torch.autocast`` asks of the device is asked here.

    Args:
        region: The state to run it in.
        operator: What is called.

    Returns:
        A function of the operator's arguments.  It switches the state of its thread for one call, drops the
        cache of casts where no other region is open, and puts everything back, also after an error.
    """
    device, dtype = region.device_type, region.dtype
    enabled = region.context()._enabled  # none on a device that is not there, with a warning

    def run(*args: Any, **kwargs: Any) -> Any:
        was_enabled, was_dtype = _is_enabled(device), _dtype_of(device)
        was_cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_enabled(device, enabled)
        if was_dtype is not dtype:
            torch.set_autocast_dtype(device, dtype)
        if was_cached is not region.cache:
            torch.set_autocast_cache_enabled(region.cache)
        torch.autocast_increment_nesting()
        try:
            return operator(*args, **kwargs)
        finally:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
            torch.set_autocast_enabled(device, was_enabled)
            if was_dtype is not dtype:
                torch.set_autocast_dtype(device, was_dtype)
            if was_cached is not region.cache:
                torch.set_autocast_cache_enabled(was_cached)

    return run


@contextmanager
def no_autocast() -> Iterator[None]:
    """Switch autocast off on this thread, for every device type, without touching its weight cache.

    ``torch.autocast(enabled=False)`` would count as a region, and leaving the outermost region clears the
    process-wide cache of casts; switching the flags leaves a surrounding region of the user as it was.
    """
    enabled = [device for device in DEVICE_TYPES if _is_enabled(device)]
    for device in enabled:
        torch.set_autocast_enabled(device, False)
    try:
        yield
    finally:
        for device in enabled:
            torch.set_autocast_enabled(device, True)
