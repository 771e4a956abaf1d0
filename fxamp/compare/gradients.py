"""Gradients in lockstep: one backward pass for both runs.

Autograd calls first what was recorded last, and the two runs were recorded operator by operator; so the
gradients of a result and of its shadow arrive next to each other, and no more than a few are held.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fxamp.compare.kinds import Finding, Kind
from fxamp.compare.rows import Count
from fxamp.compare.statistics import Tally

__all__ = ["Gradients"]

_MANY = 0.1  # share of a gradient's elements that are lost


class Gradients:
    """Compares the gradients of pairs of tensors as they are computed.

    Args:
        scale: The loss scale of the run; the reference has none.
    """

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self._waiting: dict[int, torch.Tensor] = {}
        self._pairs = 0
        self.input = self.order = 0
        self.compared = 0
        self.most_waiting = 0

    def pair(self, count: Count, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Compare the gradients of *tensor* and of its shadow *value* when they come."""
        key = self._pairs
        self._pairs += 1
        tensor.register_hook(self._hook(key, count, own=True))
        value.register_hook(self._hook(key, count, own=False))

    def _hook(self, key: int, count: Count, *, own: bool) -> Callable[[torch.Tensor], None]:
        def hook(gradient: torch.Tensor) -> None:
            other = self._waiting.pop(key, None)
            if other is None:
                self._waiting[key] = gradient.detach()
                self.most_waiting = max(self.most_waiting, len(self._waiting))
                return
            pair = (gradient, other) if own else (other, gradient)
            self._compare(count, *pair)

        return hook

    def _compare(self, count: Count, gradient: torch.Tensor, expected: torch.Tensor) -> None:
        if gradient.layout is not torch.strided or gradient.shape != expected.shape or not gradient.numel():
            return
        self.compared += 1
        self.order += 1
        tally = Tally()
        with torch.no_grad():
            tally.add(gradient, expected, self.scale)
        count.gradient.merge(tally)
        if tally.bad:
            detail = f"{tally.bad} of {tally.count} elements of the gradient are Inf or NaN"
            count.find(Finding(Kind.GRADIENT_OVERFLOW, detail, self.input, self.order))
        lost = tally.underflow / tally.nonzero if tally.nonzero else 0.0
        if lost > _MANY:
            detail = f"{lost:.0%} of the gradient's elements are 0 in {gradient.dtype.abbr}"
            detail += self._typical(expected)
            count.find(Finding(Kind.GRADIENT_UNDERFLOW, detail, self.input, self.order))

    def _typical(self, expected: torch.Tensor) -> str:
        """How large the gradient would be, of which half of the elements are smaller."""
        sizes = expected.detach().abs()
        return f"; its median size would be {float(sizes[sizes > 0].median()) * self.scale:.1e}"

    def leaf(self, gradient: Any, expected: Any, count: Count) -> None:
        """Compare the gradients of a parameter."""
        if gradient is not None and expected is not None:
            self._compare(count, gradient, expected)
