"""Say what a user may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["near_matches"]


def near_matches(wanted: str, known: Iterable[str], most: int = 3) -> str:
    """A line with the names of *known* that are most like *wanted*, ``""`` if none is."""
    names = list(dict.fromkeys(known))
    found = difflib.get_close_matches(wanted, names, n=most, cutoff=0.5)
    tail = wanted.rpartition("::")[2].rpartition(".")[2]
    inside = [name for name in names if tail and tail in name and name not in found]
    chosen = [*found, *inside][:most]
    return f"\n  near to it:  {', '.join(chosen)}" if chosen else ""
