"""What torch's exporter refuses is named: the operator, and the line that calls it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import fxamp


@torch.library.custom_op("fxamp_tests::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    """An operator that ONNX has no word for."""
    return x / 2


@halved.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Halved(nn.Module):
    """Calls it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = halved(x.relu())
        return result


def test_an_operator_without_a_translation_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    with pytest.raises(fxamp.ExportError, match=r"at fxamp_tests\.halved\.default"):
        fxamp.export(Halved(), (torch.randn(2, 3),), path, dtype=torch.float16, device_type="cpu")
    assert not path.exists()
