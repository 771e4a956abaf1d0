"""What a program must know of a tensor that it is given, besides its sizes."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["describe"]


def describe(tensor: torch.Tensor) -> Any:
    """What a program must know of an input besides its sizes."""
    requires_grad = tensor.requires_grad
    return (
        tensor.dtype,
        tensor.device,
        requires_grad and (tensor.is_leaf and not tensor._is_view(), True),
        tensor.dim(),
        _layout(tensor),
        type(tensor),
    )


def _layout(tensor: torch.Tensor) -> Any:
    if tensor.layout is not torch.strided:
        return tensor.layout
    if tensor.is_contiguous():
        return True
    strides = tensor.stride()
    return tuple(sorted(range(len(strides)), key=strides.__getitem__, reverse=True))
