"""The casts of weights that eager autocast itself keeps, read from its own cache.

Inside a region of the user's, eager autocast makes one cast of a float32 leaf for the length of the
outermost region, in a cache that torch shows to nobody.  Compiled graphs and the eager code around them
must use that same cast, for the gradients of a weight meet in it.

So it is asked for in the one way there is: an operator that autocast casts is called on the weight, with
autocast on.  The other operand is empty, so nothing is computed; the operator saves the cast for its
backward, and saving is where a hook sees it.
"""

from __future__ import annotations

import functools

import torch

__all__ = ["cached_cast"]

_CONVOLUTIONS = {3: torch.conv1d, 4: torch.conv2d, 5: torch.conv3d}


def cached_cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """*tensor* as *dtype*, as eager autocast has it in its cache, or puts it there now.

    As in eager autocast the tensor alone is the key: asked for in another dtype, it comes in the first one.

    Args:
        tensor: A float32 leaf that requires grad, any shape.
        dtype: The low precision dtype of the region.
    """
    saved: list[torch.Tensor] = []

    def pack(value: torch.Tensor) -> torch.Tensor:
        saved.append(value)
        return value

    # The flags alone: a region of its own would clear the cache at its end.
    device_type = tensor.device.type
    enabled, before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, dtype)
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, pack):
            _save_the_cast(tensor, dtype)
    finally:
        torch.set_autocast_enabled(device_type, enabled)
        torch.set_autocast_dtype(device_type, before)
    for value in saved:
        whole = value if value._base is None else value._base
        if whole.requires_grad and whole.shape == tensor.shape and not whole.is_leaf:
            return whole
    with torch.enable_grad():
        return tensor.to(dtype)  # a shape that no operator takes whole: cast once a graph


def _save_the_cast(tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Call an operator that saves the cast of *tensor*, or a view of it, and computes nothing.

    Both are cast on every device type that has autocast.
    """
    if tensor.dim() in _CONVOLUTIONS and not tensor.is_contiguous():
        nothing = _empty((0, *tensor.shape[1:]), dtype, tensor.device)
        _CONVOLUTIONS[tensor.dim()](nothing, tensor)
    elif tensor.dim():
        torch.matmul(tensor, _empty((tensor.shape[-1], 0), dtype, tensor.device))


@functools.lru_cache(maxsize=256)
def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device, requires_grad=True)
