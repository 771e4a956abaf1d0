"""Bodies of composite operators whose C++ code asks for plain sizes, where symbolic ones would do.

The C++ implementation of ``upsample_*.vec`` works out the size of the result and calls the overload that
takes it.  Asking it would make the batch a number; this does the same arithmetic on symbolic sizes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._decomp.decompositions import upsample_compute_output_size
from torch._ops import OpOverload

__all__ = ["call_body", "is_upsample"]


def call_body(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do what the composite operator *target* does, in terms of other operators."""
    if is_upsample(target) and not kwargs:
        return _upsample(target, *args)
    return target._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def is_upsample(target: OpOverload) -> bool:
    """Whether *target* is one whose body is written here."""
    return "upsample" in target._schema.name and target._overloadname == "vec"


def _upsample(target: OpOverload, x: torch.Tensor, output_size: Any, *rest: Any) -> Any:
    *flags, factors = rest
    size = upsample_compute_output_size(x.size(), output_size, factors)
    scales = [None] * (x.dim() - 2) if factors is None else factors
    return target.overloadpacket.default(x, size, *flags, *scales)
