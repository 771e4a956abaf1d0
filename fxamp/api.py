"""The public entry: ``convert``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fxamp.capture.symbols import Sizes
from fxamp.errors import ArgumentError
from fxamp.policy import Policy
from fxamp.runtime.amp_module import AmpModule
from fxamp.runtime.options import Options
from fxamp.runtime.stand_in import device_type_of

__all__ = ["convert"]


def convert(
    model: nn.Module | Callable[..., Any],
    example_args: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    device_type: str | None = None,
    dtype: torch.dtype | None = None,
    policy: Policy | None = None,
    dynamic_shapes: Any = None,
) -> AmpModule:
    """*model*, as ``torch.autocast(device_type, dtype)`` would run it, with every cast written in a graph.

    The model itself is not changed; the result shares its parameters.  Without example arguments the first
    call captures; with them the call that they make is captured (not run) at once.

    Args:
        model: A module, or a plain function of tensors (a loss, say).
        example_args: Positional arguments of a typical call.
        example_kwargs: Keyword arguments of it.
        device_type: Whose autocast: ``"cuda"``, ``"cpu"``, ...; by default that of where the parameters are.
            It need not be on this machine: the casts of another device type are written all the same, and
            run on the tensors that there are, with the kernels of the device that they are on.
        dtype: float16 or bfloat16; by default ``torch.get_autocast_dtype(device_type)``.
        policy: Which operators are cast; by default ``Policy.native(device_type, dtype)``.
        dynamic_shapes: Which sizes one captured program serves.  By default all, where the model allows;
            of inputs with more than three dimensions at first only the batch, and all once another
            size is seen.  ``True``: all from the start; ``False``: those of the call that was captured;
            else the structure that ``torch.export.export`` takes.

    Raises:
        PolicyError: The device type or dtype has no autocast, or an override selects a module that there is
            not, or, with example arguments, an operator that is not called, or eager autocast refuses an
            operator of the model.
        ArgumentError: *dynamic_shapes* does not fit the arguments, or *device_type* or *dtype* the policy.
        TypeError: *model* is neither a module nor callable.

    Example:
        >>> amp = convert(nn.Linear(4, 2), dtype=torch.bfloat16)
        >>> amp(torch.ones(3, 4)).dtype
        torch.bfloat16
    """
    if not callable(model):
        raise TypeError(f"convert takes an nn.Module or a function, not {type(model).__name__}")
    if policy is None:
        policy = Policy.native(device_type or device_type_of(model) or _default_device_type(), dtype)
    else:
        _check_policy(policy, device_type, dtype)
    amp = AmpModule(model, Options(policy, *_sizes(dynamic_shapes)))
    if example_args is not None or example_kwargs is not None:
        amp.capture(*(example_args or ()), **(example_kwargs or {}))
    return amp


def _default_device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _check_policy(policy: Policy, device_type: str | None, dtype: torch.dtype | None) -> None:
    if device_type not in (None, policy.table, policy.device_type):
        raise ArgumentError(f"device_type is {device_type!r}, the policy is one for {policy.table!r}")
    if dtype not in (None, policy.low):
        raise ArgumentError(f"dtype is {dtype}, the policy is one for {policy.low}")


def _sizes(dynamic_shapes: Any) -> tuple[Sizes, Any]:
    if dynamic_shapes is None:
        return Sizes.LEADING, None
    if isinstance(dynamic_shapes, bool):
        return (Sizes.ALL if dynamic_shapes else Sizes.FIXED), None
    return Sizes.LEADING, dynamic_shapes
