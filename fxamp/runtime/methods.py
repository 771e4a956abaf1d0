"""The source's own methods, for the converted model: what it calls itself is converted.

``amp.generate(x)`` is ``source.generate(x)`` under eager autocast.  The method's Python runs in a real
region, with a stand-in as its ``self``: an object of a subclass of the source's class that shares its
``__dict__``.  So ``isinstance``, ``super()`` and attributes are the source's; only ``self(...)`` is a call
of the converted model.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from fxamp.ir.modules import is_opaque
from fxamp.ir.regions import RealRegion

__all__ = ["bound_to", "signed_like"]

_SLOT = "_fxamp_converted"


def bound_to(converted: nn.Module, source: nn.Module, region: RealRegion, value: object) -> object:
    """*value*, an attribute of *source*; a method of it calls *converted* and runs in *region*."""
    if not isinstance(value, MethodType) or value.__self__ is not source or is_opaque(source):
        return value
    method = MethodType(value.__func__, _stand_in(converted, source))
    if inspect.isgeneratorfunction(method) or inspect.iscoroutinefunction(method):
        return method  # a region around the call would not be around its body

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with region.context():
            result = method(*args, **kwargs)
        return converted if result is method.__self__ else result

    return call


def _stand_in(converted: nn.Module, source: nn.Module) -> nn.Module:
    cls: Any = type(source)
    stand_in: nn.Module = object.__new__(_stand_in_class(cls))
    object.__setattr__(stand_in, "__dict__", source.__dict__)
    object.__setattr__(stand_in, _SLOT, converted)
    return stand_in


@functools.lru_cache(maxsize=1024)
def _stand_in_class(cls: Any) -> Any:
    def new(stand_in: Any, *args: Any, **kwargs: Any) -> Any:
        """What ``type(self)(...)`` gives in the source's code: a plain one."""
        return cls(*args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, _SLOT)(*args, **kwargs)

    namespace = {
        "__slots__": (_SLOT,),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__new__": new,
        "__call__": call,
        "__class__": property(lambda self: cls),
    }
    return type(cls.__name__, (cls,), namespace)


def signed_like(function: Callable[..., Any], source: Callable[..., Any]) -> FunctionType:
    """A copy of the method *function* with the signature of *source*, a module or a function."""
    assert isinstance(function, FunctionType)
    copied = FunctionType(function.__code__, function.__globals__, function.__name__)
    copied.__doc__, copied.__qualname__ = function.__doc__, function.__qualname__
    try:
        signature = inspect.signature(source.forward if isinstance(source, nn.Module) else source)
    except (TypeError, ValueError):  # written in C
        return copied
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    rest = [each for each in signature.parameters.values() if each.name != "self"]
    copied.__signature__ = signature.replace(parameters=[first, *rest])  # type: ignore[attr-defined]
    return copied
