"""A comparison holds little more than the two runs that it compares: counted from storages."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxamp
from tests.live_bytes import LiveBytes


class Pyramid(nn.Module):
    """Two resolutions and a skip: activations are most of its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1, stride=2)
        self.c, self.d = nn.Conv2d(32, 16, 3, padding=1), nn.Conv2d(32, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Eight channels of an image ``(batch, 3, height, width)``."""
        a = torch.relu(self.a(x))
        b = functional.interpolate(torch.relu(self.c(torch.relu(self.b(a)))), scale_factor=2)
        y: Tensor = self.d(torch.cat([a, b], 1)).softmax(1)
        return y


class Tower(nn.Module):
    """Blocks of one width: weights are most of its memory."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Linear(512, 512), nn.LayerNorm(512), nn.GELU())
        self.blocks = nn.Sequential(*blocks, *(nn.Linear(512, 512) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, 512)`` of ``(batch, 512)``."""
        y: Tensor = self.blocks(x)
        return y


def _peak(run: Callable[[], Any]) -> int:
    gc.collect()
    with torch.no_grad(), LiveBytes() as counted:
        result = run()
    del result
    return int(counted.peak)


@pytest.mark.parametrize(
    ("model", "x"),
    [(Pyramid(), torch.randn(1, 3, 160, 160)), (Tower(), torch.randn(1024, 512))],
    ids=["pyramid", "tower"],
)
def test_it_holds_at_most_1_3_of_both_runs(model: nn.Module, x: Tensor) -> None:
    def autocast() -> Any:
        with torch.autocast("cpu", dtype=torch.float16):
            return model(x)

    both = _peak(autocast) + _peak(lambda: model(x))
    held = _peak(lambda: fxamp.compare(model, x, ("float32",), dtype=torch.float16))
    assert held <= 1.3 * both
