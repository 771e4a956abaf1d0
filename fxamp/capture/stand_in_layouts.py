"""Record ``x.contiguous()`` also where *x* is contiguous here; where the graph is meant for it may not be.

Kernels lay their results out as suits them, and ``Tensor.contiguous`` of a contiguous tensor is no operator
at all.  A graph that is captured on the CPU for CUDA must not lose it: a ``view`` may follow.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fxamp.policy import Policy

__all__ = ["layouts_recorded"]


@contextmanager
def layouts_recorded(policy: Policy) -> Iterator[None]:
    """On this thread every ``contiguous`` reaches the dispatcher, if *policy*'s device is stood in for."""
    if policy.table == policy.device_type:
        yield
        return
    here, plain = threading.get_ident(), torch.Tensor.contiguous
    cls: Any = torch.Tensor

    def contiguous(tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:  # memory_format is a keyword
        if threading.get_ident() != here or torch.overrides.has_torch_function_unary(tensor):
            return plain(tensor, **kwargs)
        result: torch.Tensor = torch.ops.aten.contiguous.default(tensor, **kwargs)
        return result

    cls.contiguous = contiguous
    try:
        yield
    finally:
        del cls.contiguous
