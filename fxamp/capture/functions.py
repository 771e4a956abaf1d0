"""Record a custom ``autograd.Function`` that takes part in the gradient as one node, which calls it.

Its backward is the user's own code, so the function stays whole: it runs in a real region, as in eager, and
``custom_fwd`` and ``custom_bwd`` see what they would see there.  Where no gradient is recorded its forward is
recorded operator by operator, like any code.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxamp.capture.recorder import Recorder
from fxamp.errors import CaptureError
from fxamp.ir.blocks import CustomFunction

__all__ = ["functions_recorded"]


@contextmanager
def functions_recorded(recorder: Recorder) -> Iterator[None]:
    """Functions that this thread applies become nodes of *recorder*'s graph."""
    cls: Any = torch.autograd.Function
    original, here = vars(cls)["apply"], threading.get_ident()

    def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
        plain: Callable[..., Any] = original.__get__(None, function)
        if threading.get_ident() != here or not recorder.is_open or not _takes_part(args):
            return plain(*args, **kwargs)
        _refuse_code(function, args)
        return recorder.record_function(CustomFunction(function, recorder.region_now()), plain, args, kwargs)

    cls.apply = classmethod(apply)
    try:
        yield
    finally:
        cls.apply = original


def _takes_part(args: tuple[Any, ...]) -> bool:
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _refuse_code(function: Any, args: tuple[Any, ...]) -> None:
    """A module or function among the arguments would be called out of the recorder's sight."""
    for arg in pytree.tree_leaves(args):
        if callable(arg) and not isinstance(arg, (torch.Tensor, type)):
            raise CaptureError(f"the custom autograd.Function {function.__name__} is passed code to run")
