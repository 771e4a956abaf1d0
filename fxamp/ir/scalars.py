"""The numbers in a call of an operator, and whether a dtype has them.

A number does not fit a dtype if it is finite and beyond the largest finite value there (torch's operators
raise on it, or compute with Inf), or if it is not 0 and becomes 0.  Inf and NaN fit every floating dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

__all__ = ["is_flushed", "overflows", "scalar_arguments"]


def scalar_arguments(
    operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, float]]:
    """The numbers that a call of *operator* computes with, each with the name of its argument.

    Sizes, dimensions and flags are no such numbers.
    """
    schema = operator._schema.arguments
    values = dict(zip((argument.name for argument in schema), args, strict=False)) | dict(kwargs)
    for argument in schema:
        value = values.get(argument.name)
        if isinstance(value, float) or (type(value) is int and _takes_numbers(argument)):
            yield argument.name, float(value)


def _takes_numbers(argument: torch.Argument) -> bool:
    """Whether an int given for *argument* is a number like others, and not a size or a dimension."""
    name = str(argument.type).lower()
    return "number" in name or name in ("tensor", "optional[tensor]")


def overflows(value: float, dtype: torch.dtype) -> bool:
    """Whether *value* is finite and beyond the largest finite number of *dtype*."""
    return math.isfinite(value) and abs(value) > torch.finfo(dtype).max


def is_flushed(value: float, dtype: torch.dtype) -> bool:
    """Whether *value* is not 0, and 0 in *dtype*: at most half of the smallest subnormal number."""
    limits = torch.finfo(dtype)
    return 0 < abs(value) <= limits.smallest_normal * limits.eps / 2
