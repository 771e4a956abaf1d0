"""Every tensor in whatever a model returns: containers, dataclasses, caches, objects with attributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["named_tensors"]


def named_tensors(value: Any) -> dict[str, Tensor]:
    """The tensors found anywhere in *value* by the path to them, each object once."""
    return dict(_walk(value, "", set()))


def _walk(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path or "output", value
        return
    if value is None or isinstance(value, (str, bytes, int, float, complex, type, torch.dtype, torch.device)):
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    for key, child in _children(value):
        yield from _walk(child, f"{path}.{key}" if path else str(key), seen)


def _children(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(enumerate(value))
    if isinstance(value, nn.Module) or callable(value):
        return []
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    held = [(name, getattr(value, name)) for name in slots if hasattr(value, name)]
    return held + list(getattr(value, "__dict__", {}).items())
