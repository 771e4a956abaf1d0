"""Fakes of parameters and buffers: most are plain tensors, whose fakes are made in a fraction of the time."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from fxamp.ir.rounded_weight import RoundedWeight

__all__ = ["fake_like", "stand_in_device", "without_meta"]


def fake_like(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A leaf in *mode* with *tensor*'s own sizes and dtype; it requires grad if *tensor* does."""
    rounded = isinstance(tensor, RoundedWeight)
    if rounded or _is_plain(tensor):
        shape, strides = tensor.shape, tensor.stride()
        with (
            in_kernel_invocation_manager(mode),
            torch.inference_mode(mode=False) if rounded else nullcontext(),
        ):
            meta = torch.empty_strided(shape, strides, dtype=tensor.dtype, device="meta")
        fake: torch.Tensor = FakeTensor(mode, meta, stand_in_device(tensor))
    else:
        fake = mode.from_tensor(without_meta(tensor.detach()), static_shapes=True)
    return fake.requires_grad_(tensor.requires_grad)


def stand_in_device(tensor: torch.Tensor) -> torch.device:
    """Where *tensor* is taken to be: one on the meta device, which has no values yet, on the CPU."""
    return torch.device("cpu") if tensor.device.type == "meta" else tensor.device


def without_meta(tensor: torch.Tensor) -> torch.Tensor:
    """*tensor*, or if it is on the meta device one of its layout on the CPU, of unset memory."""
    if tensor.device.type != "meta":
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether sizes, strides, dtype and device are all that there is to *tensor*."""
    special = tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg()
    return (
        tensor.layout is torch.strided
        and not special
        and not tensor._is_view()
        and not tensor.is_inference()
        and not torch.is_inference_mode_enabled()
        and bool(tensor.storage_offset() == 0)
        and bool(tensor.untyped_storage().nbytes() == tensor.nbytes)
    )
