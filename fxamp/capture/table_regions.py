"""Let regions of the device type whose table is used act on the device type that stands in for it.

Under CUDA's table on CPU tensors, a model's own ``torch.autocast("cuda", enabled=False)`` must do to the
CPU tensors what it would do to CUDA's, also on a machine without CUDA, where torch would switch it off.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from fxamp.capture.replaced import replaced
from fxamp.policy import Policy

__all__ = ["table_regions"]


@contextmanager
def table_regions(policy: Policy) -> Iterator[None]:
    """Inside, on this thread, autocast of *policy*'s table is autocast of its device type."""
    if policy.table == policy.device_type:
        yield
        return
    here = threading.get_ident()

    def mapped(device_type: Any) -> Any:
        meant = device_type == policy.table and threading.get_ident() == here
        return policy.device_type if meant else device_type

    def of_device(original: Callable[..., Any]) -> Callable[..., Any]:
        def ask(device_type: str = "cuda") -> Any:
            return original(mapped(device_type))

        return ask

    cls: Any = torch.autocast
    enter = cls.__init__

    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        enter(self, mapped(device_type), *args, **kwargs)

    names = vars(torch)
    with ExitStack() as stack:
        for name in ("is_autocast_enabled", "get_autocast_dtype"):
            stack.enter_context(replaced(names, name, of_device(names[name])))
        stack.enter_context(replaced(names, "get_autocast_gpu_dtype", of_device(torch.get_autocast_dtype)))
        cls.__init__ = init
        stack.callback(setattr, cls, "__init__", enter)
        yield
