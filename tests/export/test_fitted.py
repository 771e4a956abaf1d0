"""What does not fit is told before anything is written, or clamped if that is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxamp


class Divides(nn.Module):
    """A weight beyond float16, and an eps that has no effect in it."""

    def __init__(self) -> None:
        super().__init__()
        self.big = nn.Linear(8, 8)
        with torch.no_grad():
            self.big.weight[0, 0] = 1e6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.big(x)
        result: torch.Tensor = y / (y.abs() + 1e-12)
        return result


CPU: dict[str, Any] = {"dtype": torch.float16, "device_type": "cpu"}
CALL = (torch.ones(4, 8),)


def test_a_warning_names_each_and_the_artifact_keeps_them(tmp_path: Path) -> None:
    with pytest.warns(fxamp.ExportWarning, match="2 constants do not fit") as warned:
        artifact = fxamp.export(
            Divides(), CALL, tmp_path / "model.pt2", dtype=torch.float16, device_type="cpu"
        )

    assert "big.weight" in str(warned[0].message)
    assert len(artifact.findings) == 2
    assert fxamp.read_artifact(tmp_path / "model.pt2").findings == artifact.findings


def test_with_the_suggested_policy_nothing_is_found(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    policy = fxamp.Policy.native("cpu", torch.float16).keep("float32", module="big")
    policy = policy.keep("float32", op="aten::add")

    artifact = fxamp.export(Divides(), CALL, tmp_path / "model.pt2", policy=policy, fit="error", check=False)

    assert artifact.findings == ()
    assert not [warning for warning in recwarn if warning.category is fxamp.ExportWarning]


def test_error_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(fxamp.ExportError, match=r"big\.weight"):
        fxamp.export(Divides(), CALL, tmp_path / "model.pt2", **CPU, fit="error")
    assert list(tmp_path.iterdir()) == []


def test_clamp_changes_the_artifact_and_not_the_model(tmp_path: Path) -> None:
    model = Divides()

    artifact = fxamp.export(model, CALL, tmp_path / "model.pt2", **CPU, fit="clamp")

    loaded = torch.export.load(tmp_path / "model.pt2")
    assert loaded.state_dict["big.weight"][0, 0] == 65504
    assert torch.isfinite(loaded.module()(*CALL)[:, 1:]).all()
    assert all(finding.startswith("clamped: ") for finding in artifact.findings)
    assert model.big.weight[0, 0] == 1e6


def test_another_choice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(fxamp.ArgumentError, match="'warn', 'error', 'clamp'"):
        fxamp.export(Divides(), CALL, tmp_path / "model.pt2", fit="saturate")  # type: ignore[arg-type]
