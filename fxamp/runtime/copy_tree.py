"""A copy of a module tree in which given tensors are replaced, wherever the modules hold them."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import nn

from fxamp.errors import ArgumentError

__all__ = ["copy_tree"]


def copy_tree(root: nn.Module, tensors: Mapping[int, torch.Tensor]) -> nn.Module:
    """A deep copy of *root*, with others in the place of some tensors.

    Args:
        root: A module; not changed.
        tensors: By ``id`` of a tensor of *root*, what the copy holds instead: in parameters, buffers, lists,
            ...

    Raises:
        ArgumentError: A module holds something that cannot be copied.
    """
    memo: dict[int, object] = dict(tensors)
    for tensor in _made_by_autograd(root):
        memo.setdefault(id(tensor), tensor.detach().clone())
    try:
        copied: nn.Module = copy.deepcopy(root, memo)
    except Exception as error:
        raise ArgumentError(
            f"a frozen module is a copy of the model, and {type(root).__name__} cannot be copied: "
            f"{type(error).__name__}: {error}\n  copy.deepcopy(model) must work"
        ) from error
    return copied


def _made_by_autograd(root: nn.Module) -> list[torch.Tensor]:
    """Attributes that ``deepcopy`` refuses, such as the weight that ``weight_norm`` computed last."""
    return [
        value
        for module in root.modules()
        for value in module.__dict__.values()
        if isinstance(value, torch.Tensor) and not value.is_leaf
    ]
