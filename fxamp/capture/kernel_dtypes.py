"""The dtypes that a kernel which consults autocast itself gives: asked of the kernel, on real tensors.

What such a kernel calls decides the dtype of its result, and a fake tensor has no kernel: its result has
the dtype that the operator gives without autocast.  So the operator is called once on ones of the
example's sizes, inside the region, and the fake result takes over the dtypes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.node import map_aggregate

from fxamp.ir.facts import example_size

__all__ = ["with_kernel_dtypes"]


def with_kernel_dtypes(
    func: OpOverload, args: Any, kwargs: Any, result: Any, call: Callable[[Any, Any], Any] | None = None
) -> Any:
    """*result* of *func* on fake tensors, with the dtypes that its kernel gives in the present region.

    Args:
        func: The operator.
        args: What it was called with.
        kwargs: Likewise.
        result: What it gave.
        call: Calls it under another policy than torch's, with ``(args, kwargs)``.
    """
    generator = torch._C.default_generator
    state = generator.get_state()
    try:
        with unset_fake_temporarily(), torch.no_grad():
            real_args, real_kwargs = map_aggregate((args, kwargs), _real)
            real = call(real_args, real_kwargs) if call else func(*real_args, **real_kwargs)
    except (RuntimeError, ValueError, IndexError):  # it needs more sensible values than ones
        return result
    finally:
        generator.set_state(state)
    return _take_over(result, real)


def _real(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        shape = [_real(size) for size in value.shape]
        floating = value.dtype.is_floating_point or value.dtype.is_complex
        return torch.full(shape, 1 if floating else 0, dtype=value.dtype, device=value.device)
    if isinstance(value, torch.SymInt):
        return example_size(value)
    return value


def _take_over(fake: Any, real: Any) -> Any:
    if isinstance(fake, torch.Tensor) and isinstance(real, torch.Tensor):
        return fake if fake.dtype is real.dtype else fake.to(real.dtype)
    if isinstance(fake, (list, tuple)):
        return type(fake)(_take_over(one, other) for one, other in zip(fake, real, strict=True))
    return fake
