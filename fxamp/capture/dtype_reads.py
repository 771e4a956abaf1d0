"""Where the model's Python asks for a dtype, since what it does next may hang on an override.

An override changes dtypes, and ``if x.dtype == torch.float16:`` may then take another way, or
``mask.to(x.dtype)`` make something else.  That is as it should be, but it is to be reported.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from fxamp.ir.where import Where, where_of

__all__ = ["ChangedRead", "DtypeRead", "changed_reads", "dtype_reads_noted"]


@dataclass(frozen=True)
class DtypeRead:
    """One ``x.dtype`` in the model's Python.

    Attributes:
        where: The source line.
        dtype: What it gave.
    """

    where: Where
    dtype: torch.dtype


@dataclass(frozen=True)
class ChangedRead:
    """A read that gives something else than it would without the overrides.

    Attributes:
        where: The source line.
        dtype: What it gives.
        without: What it would give; ``None`` if that line would not be reached.
    """

    where: Where
    dtype: torch.dtype
    without: torch.dtype | None

    def __str__(self) -> str:
        other = f"instead of {self.without}" if self.without is not None else "and is not reached without"
        return f"the overrides let Python read {self.dtype} {other}  ({self.where})"


@contextmanager
def dtype_reads_noted(noted: list[DtypeRead]) -> Iterator[None]:
    """Append to *noted* what the model's Python reads of fake tensors on this thread."""
    cls: Any = FakeTensor
    plain: Any = torch.Tensor.dtype
    here = threading.get_ident()

    def read(tensor: torch.Tensor) -> torch.dtype:
        dtype: torch.dtype = plain.__get__(tensor)
        where = where_of(sys._getframe(1)) if threading.get_ident() == here else None
        if where is not None:
            noted.append(DtypeRead(where, dtype))
        return dtype

    cls.dtype = property(read)
    try:
        yield
    finally:
        del cls.dtype


def changed_reads(found: Sequence[DtypeRead], without: Sequence[DtypeRead]) -> tuple[ChangedRead, ...]:
    """What of *found*, read under the overrides, is not as *without* them; each line once."""
    changed: dict[ChangedRead, None] = {}
    for index, read in enumerate(found):
        other = without[index] if index < len(without) else None
        if other is None or other.where != read.where:
            changed[ChangedRead(read.where, read.dtype, None)] = None
            break  # from here on Python is on another way
        if other.dtype is not read.dtype:
            changed[ChangedRead(read.where, read.dtype, other.dtype)] = None
    return tuple(changed)
