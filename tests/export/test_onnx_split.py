"""Parts of a tensor: no cast for the sake of a sequence; if one stays, its tensors have one dtype."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

import fxamp
from fxamp.export.onnx_legalize import legalize

WAYS: dict[str, tuple[Callable[[Tensor], Sequence[Tensor]], dict[str, int]]] = {
    "equal": (lambda x: x.chunk(3, -1), {"Split": 1}),
    "a smaller last": (lambda x: x.split(5, -1), {"Slice": 3}),
    "as small as ONNX makes it": (lambda x: x[:, :11].split(4, -1), {"Slice": 1, "Split": 1}),
    "two sizes": (lambda x: x.split([8, 4], -1), {"Slice": 2}),
    "one": (lambda x: x.split(20, -1), {}),
    "rows": (lambda x: x.unbind(0), {"Slice": 2, "Squeeze": 2}),
}


class Parts(nn.Module):
    """Parts of what is in low precision."""

    def __init__(self, way: Callable[[Tensor], Sequence[Tensor]]) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(4, 12), way

    def forward(self, x: Tensor) -> list[Tensor]:
        return [part.relu() for part in self.way(self.linear(x))]


@pytest.mark.parametrize("name", WAYS)
def test_parts_of_a_bfloat16_tensor_need_no_cast(name: str, tmp_path: Path) -> None:
    way, wanted = WAYS[name]
    path = tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxamp.ExportWarning)  # of bfloat16 kernels
        artifact = fxamp.export(
            Parts(way).eval(), (torch.randn(2, 4),), path, dtype=torch.bfloat16, device_type="cpu"
        )
    assert "the same values" in artifact.check
    found = Counter(node.op_type for node in onnx.load(path).graph.node)
    assert {name: found[name] for name in ("Split", "Slice", "Squeeze") if found[name]} == wanted
    assert found["Cast"] == 1  # of the input


def test_what_is_taken_out_of_a_sequence_is_cast_back() -> None:
    model = ir.from_onnx_text("""
        <ir_version: 10, opset_import: ["" : 22]>
        parts (bfloat16[4, 6] x, bfloat16[4, 2] y) => (bfloat16[4, 2] out) {
            sizes = Constant <value_ints = [2, 4]> ()
            position = Constant <value_int = 0> ()
            sequence = SplitToSequence <axis = 1> (x, sizes)
            part = SequenceAt (sequence, position)
            out = Add (part, y)
        }
    """)
    part = next(node.outputs[0] for node in model.graph if node.op_type == "SequenceAt")
    part.type = ir.TensorType(ir.DataType.BFLOAT16)  # as torch's exporter says

    legalize(model)

    operators = [node.op_type for node in model.graph if node.op_type != "Constant"]
    assert operators == ["Cast", "SplitToSequence", "SequenceAt", "Cast", "Add"]
    onnx.checker.check_model(ir.to_proto(model), full_check=True)


class Squeezed(nn.Module):
    """Asks for dimensions to go away that cannot, and for some that can."""

    def forward(self, x: Tensor) -> list[Tensor]:
        return [x.squeeze(1), x.squeeze(-1), x.squeeze((0, 2)), x[..., 0].squeeze(0), x.sum().squeeze(0)]


def test_only_dimensions_of_one_are_squeezed(tmp_path: Path) -> None:
    path, model = (
        tmp_path / "model.onnx",
        nn.Sequential(nn.Linear(4, 6), nn.Unflatten(-1, (6, 1)), Squeezed()),
    )
    shapes = ({0: torch.export.Dim("batch")},)
    artifact = fxamp.export(
        model, (torch.randn(3, 4),), path, dtype=torch.float16, device_type="cpu", dynamic_shapes=shapes
    )
    assert "the converted model" in artifact.check
    ranks = [len(output.type.tensor_type.shape.dim) for output in onnx.load(path).graph.output]
    assert ranks == [3, 2, 2, 2, 0]
