"""A stand-in for a module whose Python must run eagerly: the same state, but calls of children go elsewhere.

The shadow shares the module's ``__dict__``, so everything that the module's code reads and writes is the
module's own.  Only where it reaches for a child module it gets that child's shadow, and calling that asks
the host.  The user's module is not touched.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Protocol

from torch import nn

from fxamp.ir.modules import is_opaque

__all__ = ["Host", "shadow_of"]

_SLOTS = ("_fxamp_host", "_fxamp_path", "_fxamp_child", "_fxamp_shadows")


class Host(Protocol):
    """Who is asked when the eager code of a shadow calls a child or reads a parameter."""

    def call_child(self, child: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call *child*, which sits at the dotted *path* below the host's module."""

    def read_parameter(self, parameter: nn.Parameter) -> None:
        """Eager code is about to use *parameter*."""


def shadow_of(module: nn.Module, host: Host) -> nn.Module:
    """The shadow of *module*: calling it runs the module's own Python, its children go to *host*."""
    return _make(module, host, "", None)


def _make(module: nn.Module, host: Host, path: str, child: nn.Module | None) -> nn.Module:
    if is_opaque(module):
        return module
    cls: Any = type(module)
    shadow: nn.Module = object.__new__(_shadow_class(cls))
    object.__setattr__(shadow, "__dict__", module.__dict__)
    values: tuple[object, ...] = (host, path, child, {})
    for slot, value in zip(_SLOTS, values, strict=True):
        object.__setattr__(shadow, slot, value)
    return shadow


@lru_cache(maxsize=1024)
def _shadow_class(cls: Any) -> Any:
    def new(shadow: Any, *args: Any, **kwargs: Any) -> Any:
        """What ``type(self)(...)`` gives in the module's code (a slice of a list): a plain one."""
        return cls(*args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._fxamp_child is None:
            return cls.__call__(self, *args, **kwargs)
        return self._fxamp_host.call_child(self._fxamp_child, self._fxamp_path, args, kwargs)

    def get(self: Any, name: str) -> Any:
        value = cls.__getattr__(self, name)
        if isinstance(value, nn.Module):
            return _child_shadow(self, name, value)
        if isinstance(value, nn.Parameter):
            self._fxamp_host.read_parameter(value)
        return value

    def modules(self: Any) -> dict[str, nn.Module | None]:
        children = self.__dict__["_modules"]
        return {
            name: None if child is None else _child_shadow(self, name, child)
            for name, child in children.items()
        }

    namespace = {
        "__slots__": _SLOTS,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__new__": new,
        "_stands_for": cls,
        "__call__": call,
        "__getattr__": get,
        "_modules": property(modules),
    }
    return type(cls.__name__, (cls,), namespace)


def _child_shadow(parent: Any, name: str, child: nn.Module) -> nn.Module:
    """The shadow of *child* as *parent* sees it; made once."""
    known = parent._fxamp_shadows.get(name)
    if known is None or known[0] is not child:
        path = f"{parent._fxamp_path}.{name}" if parent._fxamp_path else name
        known = (child, _make(child, parent._fxamp_host, path, child))
        parent._fxamp_shadows[name] = known
    shadow: nn.Module = known[1]
    return shadow
