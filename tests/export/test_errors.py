"""What cannot be exported is told with its cause and a way out, and what was there before stays."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp
from fxamp.errors import ArgumentError, ExportError
from tests.export import exported_models as models

X = torch.zeros(3, 8)


def _export(path: Any, model: nn.Module | None = None, /, *args: Any, **options: Any) -> fxamp.Artifact:
    given = args or (X,)
    chosen: dict[str, Any] = {"dtype": torch.bfloat16, "device_type": "cpu", "check": False, **options}
    return fxamp.export(model or nn.Linear(8, 4), given, path, **chosen)


class Branching(nn.Module):
    """Decides by a value, for exporters, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.linear(x)
        return scores if x.sum() > 0 else -scores


class Numpy(nn.Module):
    """Leaves torch on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(self.linear(x).float().numpy() + 1)


class Appending(nn.Module):
    """Writes into the list that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor, found: list[Tensor]) -> Tensor:
        scores: Tensor = self.linear(x)
        found.append(scores)
        return scores + 1


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"is in a folder that is not there: [\s\S]*a folder that exists"):
        _export(tmp_path / "none" / "model.pt2")


def test_a_folder_in_the_place_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "model.pt2").mkdir()
    with pytest.raises(ArgumentError, match=r"is a folder[\s\S]*name a file"):
        _export(tmp_path / "model.pt2")


def test_no_path_at_all() -> None:
    with pytest.raises(ArgumentError, match=r"needs the file to write:  fxamp\.export"):
        fxamp.export(nn.Linear(8, 4), (X,))


@pytest.mark.parametrize("name", ["model.bin", "model"])
def test_an_ending_that_names_no_format(name: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"names no format[\s\S]*pt2, aoti, onnx"):
        _export(tmp_path / name)


def test_a_format_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"format='tflite' names no format[\s\S]*pt2, aoti, onnx"):
        _export(tmp_path / "model.pt2", format="tflite")


def test_an_ending_that_torch_does_not_load(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"end in \.pt2 only, not model\.bin"):
        _export(tmp_path / "model.bin", format="pt2")


@pytest.mark.parametrize("choice", ["inputs", "outputs"])
def test_a_contract_that_there_is_not(choice: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=rf"{choice}='half': it is one of 'keep'|'autocast'"):
        _export(tmp_path / "model.pt2", None, **{choice: "half"})


def test_something_that_is_no_module(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"takes an nn\.Module, not builtin_function"):
        fxamp.export(torch.relu, (X,), tmp_path / "model.pt2")  # type: ignore[arg-type]


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_nobody_may_write_to(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ExportError, match=r"model\.pt2"):
        _export(tmp_path / "model.pt2")


@pytest.mark.parametrize(
    ("build", "args", "text"),
    [
        (Branching, (X,), r"Branching is no single graph[\s\S]*test_errors\.py[\s\S]*torch\.where"),
        (Numpy, (X,), r"Numpy is no single graph[\s\S]*report of the converted model"),
        (models.CountsCalls, (X,), r"CountsCalls is no single graph[\s\S]*changes the attribute 'calls'"),
        (Appending, (X, []), r"Appending writes into a list[\s\S]*let the model return"),
        (models.Conditional, (X,), r"Conditional is no single graph[\s\S]*asks Dynamo itself \(torch\.cond"),
    ],
)
def test_a_model_that_is_no_single_graph(
    build: Callable[[], nn.Module], args: tuple[Any, ...], text: str, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=text):
        _export(tmp_path / "model.pt2", build(), *args)


def test_dynamic_shapes_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"dynamic_shapes names \['y'\]; the arguments are"):
        _export(tmp_path / "model.pt2", dynamic_shapes={"y": {0: torch.export.Dim("b")}})


def test_what_was_there_before_stays_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "model.pt2"
    _export(file)
    before = file.read_bytes()
    with pytest.raises(ExportError):
        _export(file, Branching())
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt2"]


def test_a_file_that_fxamp_has_not_written(tmp_path: Path) -> None:
    file = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(nn.Linear(8, 4), (X,)), file)
    with pytest.raises(ExportError, match="says nothing about itself"):
        fxamp.read_artifact(file)
    with pytest.raises(ExportError, match="cannot read"):
        fxamp.read_artifact(tmp_path / "none.pt2")


def test_an_onnx_file_whose_entries_are_not_as_fxamp_writes_them(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    file, damaged = tmp_path / "model.onnx", tmp_path / "damaged.onnx"
    _export(file, check=False)
    for key, value in (("fxamp.plan", "no plan"), ("fxamp", "{")):
        model = onnx.load(file)
        next(entry for entry in model.metadata_props if entry.key == key).value = value
        onnx.save(model, damaged)
        with pytest.raises(ExportError, match="says about itself is no text of fxamp"):
            fxamp.read_artifact(damaged)
