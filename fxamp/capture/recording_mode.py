"""The dispatch mode that a recorder listens with: above autocast, where operators arrive as called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["RecordingMode"]


class RecordingMode(ProxyTorchDispatchMode):
    """Hands every operator that is called to *record*; torch lets only a proxy mode listen that high."""

    def __init__(self, record: Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], object]) -> None:
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)
        self._mode_key = torch._C._TorchDispatchModeKey.PROXY
        self.enter_stack = []
        self.pre_dispatch = True
        self.decomposition_table = {}
        self._decomposition_table_stack = []
        self.emulate_precision_casts = False
        self._record = record

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        return self._record(func, args, kwargs or {})

    def __sym_dispatch__(
        self, func: Callable[..., object], types: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> object:
        return func(*args, **kwargs)
