"""The casts of weights that several programs share, where eager code runs between them.

Eager autocast keeps one cast of a float32 leaf for the length of the outermost region.  One captured program
does the same by itself; but where a model runs in pieces, the pieces share the casts of one call through
the scope that the outermost call opens on its thread.
"""

from __future__ import annotations

import threading

import torch

__all__ = ["CastScope", "keep_cast"]


class _Scope(threading.local):
    casts: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None


_SCOPE = _Scope()


class CastScope:
    """Share casts among the programs that run inside; the outermost scope of the thread counts."""

    __slots__ = ("_outermost",)

    def __enter__(self) -> None:
        self._outermost = _SCOPE.casts is None
        if self._outermost:
            _SCOPE.casts = {}

    def __exit__(self, *_: object) -> None:
        if self._outermost:
            _SCOPE.casts = None


def keep_cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """*tensor* as *dtype*: the cast that this scope has already, or a new one that records gradients.

    As in eager autocast the tensor alone is the key: asked for in another dtype, it comes in the first one.
    """
    casts = _SCOPE.casts
    if casts is None:
        return tensor.to(dtype)
    held = casts.get(id(tensor))
    if held is not None:
        return held[1]
    if torch.is_grad_enabled():
        cast = tensor.to(dtype)
    else:
        with torch.enable_grad():
            cast = tensor.to(dtype)
    casts[id(tensor)] = (tensor, cast)
    return cast
