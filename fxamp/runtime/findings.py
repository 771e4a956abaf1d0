"""What came to light about a policy while the calls of one converted model were captured."""

from __future__ import annotations

from dataclasses import dataclass

from fxamp.capture.dtype_reads import ChangedRead, changed_reads
from fxamp.capture.segments import Captured

__all__ = ["Findings"]


@dataclass
class Findings:
    """Shared by the runners of one model.

    Attributes:
        meant: Which overrides have found a call that they mean, by their places.
        changed_reads: The dtypes that the model's Python reads otherwise because of overrides.
        plan_differences: How graphs differ from those of the plan that the policy comes from.
    """

    meant: frozenset[int] = frozenset()
    changed_reads: tuple[ChangedRead, ...] = ()
    plan_differences: tuple[str, ...] = ()

    def add(self, captured: Captured, without: Captured | None) -> None:
        """Note what a recording has shown, and the same one *without* overrides, if there is one."""
        self.meant |= captured.meant
        if without is not None:
            changed = changed_reads(captured.dtypes_read, without.dtypes_read)
            self.changed_reads = tuple(dict.fromkeys((*self.changed_reads, *changed)))
