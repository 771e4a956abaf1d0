"""What is taken out of an ONNX model changes no value: a number near to a neutral one stays."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn

import fxamp


class Scaled(nn.Module):
    """A tensor beside three numbers."""

    def __init__(self, added: float, taken: float, factor: float) -> None:
        super().__init__()
        self.numbers = added, taken, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added, taken, factor = self.numbers
        return ((x + added - taken) * factor / factor).relu()


class Share(nn.Module):
    """A quotient that an eps alone keeps finite."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / (x.sum(-1, keepdim=True) + 1e-15)


class Counted(nn.Module):
    """Positions among what is no padding: a mask as integers, then as wider ones."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens.ne(0).int().cumsum(1)


def _operators(path: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load(path).graph.node)


def test_a_number_that_changes_nothing_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    fxamp.export(Scaled(0.0, 0.0, 1.0), (torch.randn(2, 3),), path, dtype=torch.float16, device_type="cpu")
    assert _operators(path) == {"Relu": 1}


def test_a_number_near_to_one_that_changes_nothing_stays(tmp_path: Path) -> None:
    path, model = tmp_path / "model.onnx", Scaled(1e-12, 1e-12, 1 + 1e-6)
    fxamp.export(model, (torch.randn(2, 3),), path, dtype=torch.float16, device_type="cpu")
    assert _operators(path) == {"Add": 1, "Sub": 1, "Mul": 1, "Div": 1, "Relu": 1}


def test_an_eps_keeps_a_quotient_finite(tmp_path: Path) -> None:
    x = torch.zeros(2, 3)
    artifact = fxamp.export(Share(), (x,), tmp_path / "model.onnx", dtype=torch.float16, device_type="cpu")
    assert "the same values" in artifact.check
    assert "finite" not in artifact.check


@pytest.mark.parametrize(("shape", "kept"), [((3,), {"Relu": 1}), ((), {"Add": 1, "Relu": 1})])
def test_a_zero_that_adds_a_dimension_stays(tmp_path: Path, shape: tuple[int, ...], kept: object) -> None:
    class Widened(nn.Module):
        zero: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.zero = nn.Buffer(torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + self.zero).relu()

    path = tmp_path / "model.onnx"
    fxamp.export(Widened(), (torch.ones(shape),), path, dtype=torch.float16, device_type="cpu")
    assert _operators(path) == kept


def test_casts_of_integers_in_a_row_become_one(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    tokens = torch.tensor([[1, 2, 0, 3]])
    artifact = fxamp.export(Counted(), (tokens,), path, dtype=torch.float16, device_type="cpu")
    assert _operators(path)["Cast"] == 1
    assert "the same values" in artifact.check


def test_lines_of_generated_code_are_not_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    fxamp.export(Share(), (torch.ones(2, 3),), path, dtype=torch.float16, device_type="cpu")
    assert b"stack_trace" not in path.read_bytes()
    assert b"_Whole" not in path.read_bytes()


def test_a_file_has_no_notes_of_the_exporter_and_tells_a_dtype_once(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    fxamp.export(model, (torch.ones(2, 3),), path, dtype=torch.float16, device_type="cpu")
    written = onnx.load(path)
    assert b"pkg." not in path.read_bytes()
    assert [entry.key for entry in written.metadata_props] == ["fxamp", "fxamp.plan"]
    weights = {weight.name for weight in written.graph.initializer}
    assert not weights & {value.name for value in written.graph.value_info}


class Given(nn.Module):
    """Gives a weight, as it is and computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.points, self.linear = nn.Parameter(torch.linspace(-1, 1, 6).reshape(2, 3)), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.linear(x), self.points, self.points.sigmoid()


def test_a_weight_that_the_model_gives_has_its_dtype_and_shape(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    artifact = fxamp.export(Given(), (torch.ones(2, 3),), path, dtype=torch.float16, device_type="cpu")
    assert "the converted model" in artifact.check
    shapes = [
        [dim.dim_value for dim in output.type.tensor_type.shape.dim]
        for output in onnx.load(path).graph.output
    ]
    assert shapes == [[2, 4], [2, 3], [2, 3]]
