"""Counting what a call dispatches: operators that compute, and the casts among them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Counts"]

# Under inference mode a cast is dispatched as ``to.dtype``.
_CASTS = (torch.ops.aten._to_copy.default, torch.ops.aten.to.dtype)


class Counts(TorchDispatchMode):
    """Counts the operators that compute, the casts among them, and those casts that are of *weights*.

    What is dispatched on fake tensors, when a call is recorded, is no work of the call.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weights = {weight.untyped_storage().data_ptr() for weight in weights}
        self.operators = self.casts = self.weight_casts = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(arg, FakeTensor) for arg in args):
            return func(*args, **(kwargs or {}))
        is_view = any(returned.alias_info is not None for returned in func._schema.returns)
        computes = not is_view or func in _CASTS or func._schema.is_mutable
        self.operators += computes and func is not torch.ops.aten._unsafe_view.default
        if func in _CASTS:
            self.casts += 1
            strided = args[0].layout is torch.strided  # a sparse tensor is no weight, and has no storage
            self.weight_casts += strided and args[0].untyped_storage().data_ptr() in self._weights
        return func(*args, **(kwargs or {}))
