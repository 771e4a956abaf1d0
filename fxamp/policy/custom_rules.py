"""The rules that ``torch.library.register_autocast`` gave to custom operators, on any device type."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch._library import custom_ops
from torch._ops import OpOverload

from fxamp.policy.cast_policy import CastPolicy, OpRule
from fxamp.policy.dispatcher import autocast_key

__all__ = ["custom_rule"]

_WHY = "torch.library.register_autocast"


def custom_rule(operator: OpOverload, device_type: str, low: torch.dtype) -> OpRule | None:
    """The rule that *operator* has in autocast of *device_type*; ``None`` for one without.

    Args:
        operator: One from outside of torch's own library.
        device_type: Whose autocast.
        low: The low precision dtype of the region; the rule may name it, or float32.
    """
    dtype = _registered_dtype(operator, device_type)
    if dtype is low:
        return OpRule(operator.name(), CastPolicy.LOWER_PRECISION_FP, frozenset({device_type}), _WHY)
    if dtype is torch.float32:
        return OpRule(operator.name(), CastPolicy.FP32, frozenset({device_type}), _WHY)
    return None


def _registered_dtype(operator: OpOverload, device_type: str) -> Any:
    definition: Any = custom_ops.OPDEFS.get(operator.name())
    if definition is not None:
        return definition._autocast_dtype.get(device_type)
    key = getattr(torch._C.DispatchKey, autocast_key(device_type))
    kernel = operator.py_kernels.get(key)
    return inspect.getclosurevars(kernel).nonlocals.get("cast_inputs") if kernel is not None else None
