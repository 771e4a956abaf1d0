"""Which tensors a policy acts on when the model is on another device than the one whose table it is.

A model on the CPU that is converted for CUDA is cast as CUDA autocast would cast it, and runs on the CPU's
kernels: its CPU tensors stand in for the CUDA tensors that they will be.  A model on the meta device, which
has no values, stands in for one on the CPU.
"""

from __future__ import annotations

import torch
from torch import nn

from fxamp.policy import Policy
from fxamp.policy.dispatcher import AUTOCAST_KEYS

__all__ = ["device_type_of", "standing_in"]


def standing_in(policy: Policy, model: object) -> Policy:
    """*policy*, acting on the tensors of the device that *model* is on.

    A policy that says itself on which it acts (``policy.on("cpu")``) is not changed.
    """
    if policy.table != policy.device_type:
        return policy
    device_type = device_type_of(model)
    if device_type is None:
        device_type = policy.table if _is_there(policy.table) else "cpu"
    return policy if device_type == policy.device_type else policy.on(device_type)


def device_type_of(model: object) -> str | None:
    """Where the parameters of *model* are, or its buffers; ``None`` if it has none."""
    if not isinstance(model, nn.Module):
        return None
    for tensor in (*model.parameters(), *model.buffers()):
        device_type: str = tensor.device.type
        return device_type if device_type in AUTOCAST_KEYS else "cpu"
    return None


def _is_there(device_type: str) -> bool:
    return device_type == "cpu" or torch.get_device_module(device_type).is_available()
