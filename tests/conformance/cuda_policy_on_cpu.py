"""CUDA autocast on CPU tensors: real numbers, real gradients, no GPU.

``installed()`` puts a wrapper in front of every operator of the CUDA table, on the CPU's autocast key, and
takes the CPU's own wrappers away, for as long as it lasts.  ``torch.autocast("cpu", low)`` then does what
``torch.autocast("cuda", low)`` does on a GPU, and is an oracle for the passes: the wrapper is written here
a second time, after the C++ and not after ``passes/``.

Source: ``aten/src/ATen/autocast_mode.{h,cpp}``: ``WrapFunction_``, ``cached_cast``, ``prioritize``.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._ops import OpOverload

from fxamp.policy import REDISPATCHES, CastPolicy, OpRule, Policy
from fxamp.policy.dispatcher import registered_operators
from tests.policy.probe import overload

__all__ = ["BANNED", "installed", "override", "policy"]

BANNED = (
    "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
    "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
    "In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits\n"
    "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
    "safe to autocast."
)

_AUTOCAST = torch._C.DispatchKey.AutocastCPU
_BELOW = torch._C._dispatch_keyset_full_after(_AUTOCAST)
_ONLY = torch._C.DispatchKeySet(_AUTOCAST)


def policy(low: torch.dtype) -> Policy:
    """The policy that the installed wrappers carry out."""
    return Policy.native("cuda", low).on("cpu")


@contextmanager
def installed() -> Iterator[None]:
    """Let ``torch.autocast("cpu")`` follow the CUDA table while this lasts."""
    library = torch.library.Library("aten", "IMPL")
    cache = _Cache()
    rules = Policy.native("cuda", torch.float16).rules
    names = registered_operators("cpu") | rules.keys()
    try:
        for name in sorted(names):
            op = overload(name)
            kernel = _wrapper(op, rules[name], cache) if name in rules else _pass_through(op)
            override(library, name, kernel)
        with mock.patch.object(torch, "clear_autocast_cache", side_effect=cache.clear):
            yield
    finally:
        library._destroy()


def override(library: torch.library.Library, name: str, kernel: Callable[..., Any]) -> None:
    """Put *kernel*, which gets the dispatch keys first, in place of the operator's autocast on the CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.13 warns of the first override of all
        short = name.removeprefix("aten::")
        library.impl(short, kernel, "AutocastCPU", with_keyset=True, allow_override=True)


class _Cache:
    """The casts of leaves that a region keeps; leaving the outermost region clears it.

    As in C++ the key is the tensor alone, not the dtype, and the tensor is held weakly.
    """

    def __init__(self) -> None:
        self._casts: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def clear(self) -> None:
        self._casts.clear()

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if not _castable(tensor) or tensor.dtype is dtype:
            return tensor
        if not _keeps(tensor, dtype):
            return tensor.to(dtype)
        known = self._casts.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        with torch.enable_grad():
            cast = tensor.to(dtype)
        self._casts[id(tensor)] = (weakref.ref(tensor), cast)
        return cast


def _castable(value: object) -> bool:
    return (
        isinstance(value, Tensor)
        and value.device.type == "cpu"
        and value.is_floating_point()
        and value.dtype is not torch.float64
    )


def _keeps(tensor: Tensor, dtype: torch.dtype) -> bool:
    return (
        dtype is torch.get_autocast_dtype("cpu")
        and tensor.dtype is torch.float32
        and tensor.requires_grad
        and tensor.is_leaf
        and not tensor._is_view()
        and torch.is_autocast_cache_enabled()
        and not torch.is_inference_mode_enabled()
    )


def _pass_through(op: OpOverload) -> Callable[..., Any]:
    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        return op.redispatch(keys & _BELOW, *args, **kwargs)

    return kernel


def _wrapper(op: OpOverload, rule: OpRule, cache: _Cache) -> Callable[..., Any]:
    kinds = [str(argument.type) for argument in op._schema.arguments]
    names = [argument.name for argument in op._schema.arguments]
    appended = overload(REDISPATCHES[op.name()]) if op.name() in REDISPATCHES else None

    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        values = [*args, *(kwargs.get(name, _LEFT_OUT) for name in names[len(args) :])]
        called = op
        with torch._C._ExcludeDispatchKeyGuard(_ONLY):
            if rule.cast is CastPolicy.BANNED:
                raise RuntimeError(BANNED)
            if rule.cast is CastPolicy.FP32_SET_OPT_DTYPE:
                index = names.index("dtype")
                if _castable(values[0]) and (values[index] is _LEFT_OUT or values[index] is None):
                    values[index] = torch.float32
            elif rule.cast is CastPolicy.FP32_APPEND_DTYPE:
                assert appended is not None
                called = appended
                dtype = torch.float32 if _castable(values[0]) else values[0].dtype
                return _append(op, appended, values, dtype)
            else:
                target = _target(rule.cast, kinds, values)
                for index in reversed(range(len(values))):  # GCC's order for the arguments of a call
                    values[index] = _cast(cache, kinds[index], values[index], target)
            return _call(called, values)

    return kernel


_LEFT_OUT = object()


def _call(op: OpOverload, values: list[Any]) -> Any:
    """Call *op* with a value for each argument of its schema, those left out excepted."""
    given = zip(op._schema.arguments, values, strict=True)
    return op(**{argument.name: value for argument, value in given if value is not _LEFT_OUT})


def _append(op: OpOverload, appended: OpOverload, values: list[Any], dtype: torch.dtype) -> Any:
    defaults = [
        argument.default_value if value is _LEFT_OUT else value
        for argument, value in zip(op._schema.arguments, values, strict=True)
    ]
    return appended(*defaults, dtype=dtype)


def _target(cast: CastPolicy, kinds: list[str], values: list[Any]) -> torch.dtype:
    low = torch.get_autocast_dtype("cpu")
    if cast is CastPolicy.LOWER_PRECISION_FP:
        return low
    if cast is CastPolicy.FP32:
        return torch.float32
    assert cast is CastPolicy.PROMOTE
    widest = low
    for kind, value in zip(kinds, values, strict=True):
        if kind in ("Tensor", "List[Tensor]"):
            for tensor in value if kind == "List[Tensor]" else [value]:
                widest = _prioritize(widest, tensor, low)
    return widest


def _prioritize(current: torch.dtype, tensor: Tensor, low: torch.dtype) -> torch.dtype:
    if not _castable(tensor):
        return current
    if current is torch.float32 or tensor.dtype is torch.float32:
        return torch.float32
    if current is low and tensor.dtype is low:
        return low
    raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")


def _cast(cache: _Cache, kind: str, value: Any, target: torch.dtype) -> Any:
    if kind in ("Tensor", "Optional[Tensor]") and isinstance(value, Tensor):
        return cache.cast(value, target)
    if kind == "List[Tensor]":
        return [cache.cast(item, target) for item in value]
    return value
