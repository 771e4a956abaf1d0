"""The rounded copies of a frozen module: one a weight and dtype, made anew when the weight is written to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp
from fxamp.errors import FrozenError

BF16 = torch.bfloat16


class Both(nn.Module):
    """Uses its weight rounded and as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        """A product and a sum."""
        return torch.as_tensor(self.f(x)) * scale + self.f.weight.abs().amax()


def _frozen() -> Any:
    return fxamp.freeze(fxamp.convert(Both().eval(), dtype=BF16), (torch.ones(2, 4),))


def test_programs_share_one_rounded_copy() -> None:
    frozen = _frozen()
    for scale in (2.0, 3.0, 4.0):
        frozen(torch.ones(2, 4), scale)
    assert len(frozen.graph_modules) == 4
    lows = {
        value.data_ptr()
        for module in frozen.graph_modules
        for value in module.buffers()
        if value.dtype is BF16
    }
    (copy,) = frozen._weights.copies()
    assert lows == {copy.data_ptr()}


def test_the_copy_follows_the_weight() -> None:
    frozen = _frozen()
    (weight,) = frozen.parameters()
    (copy,) = frozen._weights.copies()
    with torch.no_grad():
        weight.mul_(1.7)
        frozen(torch.ones(2, 4))
    assert torch.equal(copy, weight.to(BF16))


class Writes(nn.Module):
    """Halves its weight in some calls."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4)

    def forward(self, x: Tensor, write: bool = False) -> Tensor:
        """A product."""
        if write:
            with torch.no_grad():
                self.f.weight.mul_(0.5)
        return torch.as_tensor(self.f(x))


def test_a_call_that_writes_to_a_frozen_weight_is_refused() -> None:
    frozen = fxamp.freeze(fxamp.convert(Writes().eval(), dtype=BF16), (torch.ones(2, 4),))
    frozen(torch.ones(2, 4))
    with pytest.raises(FrozenError, match=r"writes to the weight 'f.weight', which is frozen"):
        frozen(torch.ones(2, 4), True)
