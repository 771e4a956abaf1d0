"""Models as ONNX: valid, each weight in the dtype that it is read in, and near to the converted model."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn
from torch.export import Dim

import fxamp
from fxamp.export import onnx as onnx_format
from fxamp.export.artifact import Artifact

X = torch.linspace(-2, 2, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
TOKENS = torch.arange(2 * 5).reshape(2, 5)


class Text(nn.Module):
    """An embedding that is tied to the head, a normalisation, and a dict as the result."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.norm(self.embedding(tokens))
        return {"hidden": hidden, "logits": self.head(hidden)}


def convolutions() -> nn.Module:
    """Convolutions with normalisations, whose weights stay float32."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(288, 4)
    ).eval()


def _export(model: nn.Module, args: Any, path: Path, dtype: torch.dtype, **options: Any) -> Artifact:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxamp.ExportWarning)  # of bfloat16 kernels
        return fxamp.export(model, args, path, dtype=dtype, device_type="cpu", **options)


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            yield from _nodes(attribute.g)


def _decibels(artifact: Artifact) -> float:
    if "the same values" in artifact.check:
        return math.inf
    found = re.search(r"([\d.]+) dB", artifact.check)
    assert found is not None, artifact.check
    return float(found[1])


def _casts_of_weights(model: onnx.ModelProto) -> list[str]:
    weights = {weight.name for weight in model.graph.initializer}
    return [node.name for node in _nodes(model.graph) if node.op_type == "Cast" and node.input[0] in weights]


def _dtypes(model: onnx.ModelProto) -> dict[str, str]:
    name = onnx.TensorProto.DataType.Name
    return {weight.name: name(weight.data_type) for weight in model.graph.initializer}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_convolutional_model_is_valid_and_near(dtype: torch.dtype, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"

    artifact = _export(convolutions(), (X,), path, dtype, dynamic_shapes=({0: Dim("batch")},))

    model, low = onnx.load(path), "FLOAT16" if dtype is torch.float16 else "BFLOAT16"
    onnx.checker.check_model(str(path), full_check=True)
    assert _casts_of_weights(model) == []
    dtypes = _dtypes(model)
    assert (dtypes["0.weight"], dtypes["1.weight"]) == (low, "FLOAT")
    assert model.graph.input[0].name == "input"
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert artifact.outputs[0].dtype == str(dtype).removeprefix("torch.")
    assert _decibels(artifact) >= (55 if dtype is torch.float16 else 38)
    assert _decibels(artifact) >= 60 or "noise comes in at" in artifact.check
    assert fxamp.read_artifact(path) == artifact


def test_a_tied_weight_is_stored_in_both_dtypes_and_results_have_their_names(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"

    artifact = _export(Text(), (TOKENS,), path, torch.float16)

    model = onnx.load(path)
    sizes = [
        (_dtypes(model)[weight.name], tuple(weight.dims))
        for weight in model.graph.initializer
        if len(weight.dims) == 2
    ]
    assert sorted(sizes) == [("FLOAT", (32, 16)), ("FLOAT16", (16, 32))]
    assert [value.name for value in model.graph.output] == ["hidden", "logits"]
    assert [port.name for port in artifact.outputs] == ["hidden", "logits"]
    assert _casts_of_weights(model) == []


def test_the_contract_decides_what_goes_in_and_comes_out(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"

    _export(convolutions(), (X,), path, torch.float16, inputs="low", outputs="keep")

    graph = onnx.load(path).graph
    assert graph.input[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT16
    assert graph.output[0].type.tensor_type.elem_type == onnx.TensorProto.FLOAT


def test_a_fused_transformer_layer_is_written_operator_by_operator(tmp_path: Path) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()

    artifact = _export(
        layer, (torch.linspace(-1, 1, 96).reshape(2, 3, 16),), tmp_path / "m.onnx", torch.float16
    )

    assert "dB" in artifact.check
    assert torch.backends.mha.get_fastpath_enabled()


def test_weights_lie_in_a_file_of_their_own_if_asked(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    model = nn.Linear(64, 64, bias=False)
    frozen = fxamp.freeze(fxamp.convert(model, dtype=torch.float16, device_type="cpu"), (torch.ones(2, 64),))
    from fxamp.export.contract import Contract  # noqa: PLC0415
    from fxamp.export.deployed import deploy  # noqa: PLC0415
    from fxamp.export.describe import describe  # noqa: PLC0415

    deployed = deploy(frozen, (torch.ones(2, 64),), {}, Contract())
    onnx_format.write_onnx(deployed, describe(deployed, "onnx"), path, None, check=True, external_data=True)

    data = [file for file in tmp_path.iterdir() if file != path]
    assert [file.stat().st_size for file in data] == [64 * 64 * 2]
    assert len(onnx.load(path).graph.initializer[0].raw_data) == 64 * 64 * 2


def test_a_missing_package_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(onnx_format, "find_spec", lambda name: None if name == "onnxscript" else object())

    with pytest.raises(fxamp.ExportError, match=r"needs onnxscript\n  pip install 'fxamp\[onnx\]'"):
        _export(convolutions(), (X,), tmp_path / "model.onnx", torch.float16)
    assert list(tmp_path.iterdir()) == []


def test_an_operator_that_onnx_lacks_is_named(tmp_path: Path) -> None:
    class Lu(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            upper: torch.Tensor = torch.linalg.lu(x)[2]
            return upper

    with pytest.raises(fxamp.ExportError, match=r"torch\.onnx\.export refuses[\s\S]*linalg_lu"):
        _export(Lu(), (torch.eye(3),), tmp_path / "model.onnx", torch.float16)
    assert list(tmp_path.iterdir()) == []


def test_noise_of_casts_that_onnxruntime_leaves_out_is_told_as_that(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from fxamp.export import onnx_blame, onnx_pipeline  # noqa: PLC0415  their packages are an extra

    class Rounded(nn.Module):
        """Factors that undo each other, but for what is rounded between them."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ((x.half() * 3).relu() / 3).relu() * 7

    monkeypatch.setattr(onnx_pipeline, "ENOUGH", 90.0)
    monkeypatch.setattr(onnx_blame, "ENOUGH", 90.0)
    artifact = _export(Rounded(), (torch.rand(64, 64),), tmp_path / "model.onnx", torch.float16)
    assert (
        "noise comes in at casts to float16 and back that onnxruntime leaves out: the same" in artifact.check
    )


def test_an_operator_that_is_no_nearer_alone_is_told_with_its_own_noise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from fxamp.export import onnx_blame, onnx_pipeline  # noqa: PLC0415  their packages are an extra

    class Sums(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.instance_norm(x.bfloat16()).relu()

    monkeypatch.setattr(onnx_pipeline, "ENOUGH", 90.0)
    monkeypatch.setattr(onnx_blame, "ENOUGH", 90.0)
    artifact = _export(Sums(), (torch.rand(2, 3, 64),), tmp_path / "model.onnx", torch.bfloat16)
    assert re.search(
        r"noise comes in at aten\.\w+\.default .* alone, from torch's values, it", artifact.check
    )


def test_memory_that_nobody_has_written_to_is_no_value_to_compare() -> None:
    from fxamp.export import onnx_blame  # noqa: PLC0415  its packages are an extra

    class Filled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            memory = x.new_empty(4)
            memory.copy_(x)
            return memory.relu()

    x = torch.rand(4)
    values = onnx_blame._values_of(torch.export.export(Filled(), (x,)), {"x": x.numpy()})
    assert list(values) == ["copy_", "relu"]


class Drawing(nn.Module):
    """Drops with a probability, whatever the mode."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.linear, self.probability = nn.Linear(4, 4), probability

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.dropout(self.linear(x), self.probability, training=True)
        return nn.functional.scaled_dot_product_attention(y, y, y, dropout_p=self.probability)


@pytest.mark.parametrize("probability", [0.0, 0.5])
def test_what_torch_draws_and_a_runtime_does_not_is_a_note(probability: float, tmp_path: Path) -> None:
    call = (torch.randn(2, 3, 4),)
    artifact = fxamp.export(
        Drawing(probability).eval(), call, tmp_path / "model.onnx", dtype=torch.float16, check=False
    )
    note = (
        "random numbers of aten.dropout.default, aten.scaled_dot_product_attention.default: "
        "an ONNX runtime draws others, and leaves dropout out"
    )
    assert (note in artifact.notes) is (probability > 0)
