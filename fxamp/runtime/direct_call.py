"""The Python builtin that reaches an operator with the least overhead.

``torch.ops.aten.linear.default(x, w)`` goes through Python; ``torch._C._nn.linear(x, w)`` does not.  A
builtin is used only if a probe shows that, called with arguments of these kinds, it dispatches to just
this overload with just these arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload

from fxamp.capture.locks import pre_dispatch_lock
from fxamp.capture.recording_mode import RecordingMode

__all__ = ["direct_call"]

_NAMESPACES = (
    torch._C._nn,
    torch._C._VariableFunctions,
    torch._C._TensorBase,
    vars(torch._C)["_linalg"],
    vars(torch._C)["_special"],
    vars(torch._C)["_fft"],
)
_EXAMPLES = {int: 3, float: 3.0}
_BUILTIN = (type(torch._C._nn.linear), type(torch._C._TensorBase.view))


class _Reached(BaseException):
    def __init__(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.call = (func, args, kwargs)


def direct_call(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """The builtin for *op* when called with *args* and *kwargs*; ``None`` if there is none.

    Args:
        op: An ATen overload.
        args: Its arguments; ``torch.Tensor``, the class, stands for any tensor, and
            ``int`` and ``float`` for numbers that are computed.
        kwargs: Its keyword arguments, likewise.
    """
    try:
        return _direct_call(op, _frozen(args), tuple((key, _frozen(value)) for key, value in kwargs.items()))
    except TypeError:  # an argument that cannot be hashed
        return None


def _frozen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return (type(value) is list, tuple(_frozen(item) for item in value))
    return (None, type(value), value)


def _thawed(value: Any) -> Any:
    if value[0] is None:
        if value[2] is torch.Tensor:
            return torch.empty(0)
        return _EXAMPLES.get(value[2], value[2]) if isinstance(value[2], type) else value[2]
    return [_thawed(item) for item in value[1]]


@cache
def _direct_call(op: OpOverload, args: Any, kwargs: Any) -> Callable[..., Any] | None:
    call_args = tuple(_thawed(item) for item in args[1])
    call_kwargs = {key: _thawed(value) for key, value in kwargs}
    wanted = _complete(op, call_args, call_kwargs)
    for builtin in _candidates(op):
        if _reached(builtin, call_args, call_kwargs) == (op, wanted):
            return builtin
    return None


def _candidates(op: OpOverload) -> Iterator[Callable[..., Any]]:
    name = op._schema.name.removeprefix("aten::")
    for namespace in _NAMESPACES:
        builtin = getattr(namespace, name, None)
        if isinstance(builtin, _BUILTIN):
            yield builtin


def _reached(builtin: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The overload and the complete arguments that *builtin* dispatches to first; nothing is run."""

    def stop(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        raise _Reached(func, args, kwargs)

    with pre_dispatch_lock, enable_python_dispatcher(), RecordingMode(stop):
        try:
            builtin(*args, **kwargs)
        except _Reached as reached:
            func, args, kwargs = reached.call
            return func, _complete(func, args, kwargs)
        except (TypeError, RuntimeError):
            return None
    return None


def _complete(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Every argument of the schema, defaults filled in; tensors by identity, numbers with their class."""
    given = {argument.name: value for argument, value in zip(op._schema.arguments, args, strict=False)}
    given |= kwargs
    return [_comparable(given.get(arg.name, arg.default_value)) for arg in op._schema.arguments]


def _comparable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return ("tensor", id(value))
    if isinstance(value, (list, tuple)):
        return [_comparable(item) for item in value]
    return (type(value), value)
