"""Upsampling is opened without making a number of the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxamp
from tests.models import autocast, equal

OPTIONS: list[dict[str, Any]] = [
    {"scale_factor": 2},
    {"scale_factor": 1.7, "mode": "bilinear", "align_corners": False},
    {"size": (5, 9), "mode": "bicubic", "align_corners": True},
    {"scale_factor": 1.5, "mode": "nearest-exact", "recompute_scale_factor": True},
]


class Upsampled(nn.Module):
    """A convolution, then an interpolation."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__()
        self.conv, self.options = nn.Conv2d(3, 3, 1), options

    def forward(self, x: Tensor) -> Tensor:
        """Of images."""
        return functional.interpolate(self.conv(x), **self.options)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_one_program_serves_all_batches(options: dict[str, Any]) -> None:
    model = Upsampled(options)
    amp = fxamp.convert(model, device_type="cpu", dtype=torch.bfloat16)
    for batch in (2, 3, 5):
        x = torch.randn(batch, 3, 6, 7)
        with autocast(torch.bfloat16):
            expected = model(x)
        assert equal(amp(x), expected)
    assert len(amp.graph_modules) == 1
