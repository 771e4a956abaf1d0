"""Questions about modules."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["is_opaque"]


def is_opaque(module: nn.Module) -> bool:
    """Whether *module* is compiled already, by TorchScript or Dynamo: there is no Python to record."""
    if isinstance(module, torch.jit.ScriptModule) or module.__dict__.get("_compiled_call_impl") is not None:
        return True
    # torch._dynamo takes long to import, so its class is known by name
    return any(cls.__module__.startswith("torch._dynamo") for cls in type(module).__mro__)
