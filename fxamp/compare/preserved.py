"""Leave no trace: buffers, attributes, random states and arguments are after a run as they were before."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fxamp.compare.shadows import tensors_in
from fxamp.runtime.undo import Undo

__all__ = ["preserved"]

_DICTS = ("_parameters", "_buffers", "_modules")
_CONTAINERS = (list, dict, set, deque)


@contextmanager
def preserved(model: object, call: Any, *, copies: bool = True) -> Iterator[Undo]:
    """Put back at the end what the run inside does to *model* and to the arguments *call*.

    Args:
        model: A module, or a function.
        call: The arguments.
        copies: Whether to copy buffers and arguments first; without, the run itself says what it writes to.
    """
    undo = Undo()
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    if copies:
        undo.save(buffer for buffer in _buffers(modules))
        undo.save(tensor for tensor in tensors_in(call) if not isinstance(tensor, nn.Parameter))
    states = [_State(module) for module in modules]
    try:
        yield undo
    finally:
        undo.restore()
        for state in states:
            state.restore()


def _buffers(modules: list[nn.Module]) -> Iterator[torch.Tensor]:
    for module in modules:
        for buffer in module._buffers.values():
            if buffer is not None and buffer.layout is torch.strided:
                yield buffer


class _State:
    """The attributes of one module, and what its plain containers hold."""

    def __init__(self, module: nn.Module) -> None:
        attributes = module.__dict__
        owned: list[Any] = [attributes]
        owned += [attributes[name] for name in _DICTS if isinstance(attributes.get(name), dict)]
        owned += [value for value in attributes.values() if type(value) in _CONTAINERS]
        self._contents = [(container, container.copy()) for container in owned]

    def restore(self) -> None:
        for container, contents in self._contents:
            if isinstance(container, (list, deque)):
                if len(container) != len(contents) or any(
                    one is not other for one, other in zip(container, contents, strict=True)
                ):
                    container.clear()
                    container.extend(contents)
            elif isinstance(container, dict):
                if list(container) != list(contents) or any(
                    container[k] is not contents[k] for k in contents
                ):
                    container.clear()
                    container.update(contents)
            elif container != contents:
                container.clear()
                container.update(contents)
