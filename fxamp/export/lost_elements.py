"""Which elements of a tensor low precision does not have.

Beyond the largest: every finite element that becomes Inf counts, since one is enough for NaN.

Flushed to 0: random weights always have a few elements next to 0 that float16 has not, and nobody misses
them.  It matters where they are more than a hundredth of the norm of their row (of dimension 0: the weights
of one output; a vector is one row), which is more than any rounding takes of it.  So a row of tiny weights
counts also beside large ones, as the norm that follows may scale it up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

__all__ = ["Lost", "lost_elements"]

_SHARE = 0.01
_PART = 1 << 20  # elements that are looked at at a time: large weights are not copied


@dataclass(frozen=True)
class Lost:
    """Elements of one tensor that are lost.

    Attributes:
        count: How many.
        total: How many elements the tensor has.
        extreme: The largest of them by size, as it is in float32.
    """

    count: int
    total: int
    extreme: float


def lost_elements(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[Lost | None, Lost | None]:
    """The elements of *tensor* that become Inf in *dtype*, and those that become 0 where that matters.

    Args:
        tensor: Floating, any shape; of another layout than strided, or without values (meta), nothing is
            known to be lost.  One of *dtype* is rounded already: Inf is taken for what overflowed.
        dtype: A floating dtype.
    """
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or not tensor.numel():
        return None, None
    limits = torch.finfo(dtype)
    infinite, flushed = _Tally(tensor.numel()), _Tally(tensor.numel())
    with torch.no_grad():
        for rows in _parts(tensor.detach()):
            sizes = rows.abs()
            if bool((sizes > limits.max).any()):
                was_finite = rows.isfinite() | (tensor.dtype is dtype)
                infinite.add(rows[rows.to(dtype).isinf() & was_finite])
            zeros = (sizes <= limits.smallest_normal * limits.eps / 2) & (rows != 0)
            if bool(zeros.any()):
                flushed.add(rows[zeros & _matters(rows, zeros)])
    return infinite.lost, flushed.lost


class _Tally:
    def __init__(self, total: int) -> None:
        self.count, self.total, self.extreme = 0, total, 0.0

    def add(self, elements: torch.Tensor) -> None:
        if elements.numel():
            self.count += elements.numel()
            largest = float(elements[elements.abs().argmax()])
            self.extreme = max(self.extreme, largest, key=abs)

    @property
    def lost(self) -> Lost | None:
        return Lost(self.count, self.total, self.extreme) if self.count else None


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The rows of *tensor*, some at a time, as matrices."""
    if tensor.dim() < 2:
        yield tensor.reshape(1, -1)
        return
    row = tensor.numel() // tensor.shape[0]
    for part in tensor.split(max(1, _PART // row)):
        yield part.reshape(part.shape[0], row)


def _matters(rows: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """For each row whether its flushed elements are more than a hundredth of it; a column."""
    places = zeros.any(dim=1).nonzero().squeeze(1)
    exact = rows[places].double()  # squares of tiny elements are 0 in float32
    whole = exact.masked_fill_(~exact.isfinite(), 0).norm(dim=1)
    lost = exact.masked_fill_(~zeros[places], 0).norm(dim=1)
    matters = torch.zeros(rows.shape[0], 1, dtype=torch.bool, device=rows.device)
    matters[places[lost > whole * _SHARE]] = True
    return matters
