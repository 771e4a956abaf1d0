"""Put another value under a name for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["replaced"]


@contextmanager
def replaced(names: dict[str, Any], name: str, value: object) -> Iterator[None]:
    """*names* has *value* under *name* inside, and afterwards what it had before."""
    before = names[name]
    names[name] = value
    try:
        yield
    finally:
        names[name] = before
