"""Operators that ONNX composes of others round where torch does: in bfloat16, hardly an element differs."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import fxamp

functional = nn.functional
ONE_ELEMENT = 68.0  # decibels; 52 or less if all of them are rounded otherwise


class Layer(nn.Module):
    """A linear layer, and what is made of its result."""

    def __init__(self, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.compute = nn.Linear(16, 24), compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self.linear(x))


OPERATORS: dict[str, tuple[Callable[[Tensor], Tensor], Counter[str]]] = {
    "linear": (lambda x: x, Counter({"Cast": 1, "Reshape": 2, "Gemm": 1})),
    "silu": (functional.silu, Counter({"Sigmoid": 1, "Mul": 1, "Cast": 2})),
    "silu in place": (lambda x: functional.silu(x, inplace=True), Counter({"Sigmoid": 1, "Mul": 1})),
    "glu": (functional.glu, Counter({"Split": 1, "Sigmoid": 1, "Mul": 1, "Cast": 2})),
    "log_sigmoid": (functional.logsigmoid, Counter({"Sigmoid": 1, "Log": 1, "Cast": 2})),
    "rsqrt": (lambda x: x.relu().add(1).rsqrt(), Counter({"Sqrt": 1, "Reciprocal": 1, "Cast": 2})),
    "a factor": (lambda x: x * 0.3, Counter({"Mul": 1, "Cast": 2})),
    "a factor that bfloat16 has": (lambda x: x * 0.75, Counter({"Mul": 1, "Cast": 1})),
    "a quotient": (lambda x: x / 3.3, Counter({"Div": 1, "Cast": 2})),
    "a sum and a difference": (lambda x: x + 0.3 - 0.7, Counter({"Add": 1, "Sub": 1, "Cast": 1})),
    "a cube": (lambda x: x**3, Counter({"Mul": 2})),
    "a square": (lambda x: x**2, Counter({"Pow": 1})),
}


def _export(model: nn.Module, x: Tensor, path: Path, dtype: torch.dtype, shapes: Any = None) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxamp.ExportWarning)  # of bfloat16 kernels
        return fxamp.export(
            model.eval(), (x,), path, dtype=dtype, device_type="cpu", dynamic_shapes=shapes
        ).check


@pytest.mark.parametrize("name", OPERATORS)
def test_it_rounds_as_torch_does(name: str, tmp_path: Path) -> None:
    compute, wanted = OPERATORS[name]
    path = tmp_path / "model.onnx"

    check = _export(Layer(compute), torch.randn(2, 5, 16), path, torch.bfloat16)

    found = re.search(r"([\d.]+) dB", check)
    assert found is None or float(found[1]) > ONE_ELEMENT, check
    assert not wanted - Counter(node.op_type for node in onnx.load(path).graph.node)


def test_float16_is_not_cast_for_a_second_rounding(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    _export(Layer(functional.silu), torch.randn(2, 5, 16), path, torch.float16)
    found = Counter(node.op_type for node in onnx.load(path).graph.node)
    assert found == {"Cast": 1, "Reshape": 2, "Gemm": 1, "Sigmoid": 1, "Mul": 1}


@pytest.mark.parametrize(
    ("shape", "open_sizes"),
    [((16,), ()), ((5, 16), (0,)), ((2, 5, 16), (1,)), ((2, 5, 16), (0, 1)), ((2, 3, 5, 16), (0, 2))],
)
def test_a_linear_layer_takes_any_batch(
    shape: tuple[int, ...], open_sizes: tuple[int, ...], tmp_path: Path
) -> None:
    names = Dim("rows"), Dim("columns")
    shapes = ({axis: names[index] for index, axis in enumerate(open_sizes)},) if open_sizes else None
    path = tmp_path / "model.onnx"
    model = Layer(torch.relu)
    _export(model, torch.randn(shape), path, torch.bfloat16, shapes)

    graph = onnx.load(path).graph

    sizes = [size.dim_value or size.dim_param for size in graph.output[0].type.tensor_type.shape.dim]
    named = {axis: ("rows", "columns")[index] for index, axis in enumerate(open_sizes)}
    assert sizes == [named.get(axis, size) for axis, size in enumerate((*shape[:-1], 24))]
    assert sum(node.op_type == "Gemm" for node in graph.node) == 1


@pytest.mark.parametrize(("shape", "open_sizes"), [((2, 0, 16), ()), ((0, 16), ()), ((2, 4, 0, 16), (0, 1))])
def test_a_linear_layer_takes_a_batch_of_nothing(
    shape: tuple[int, ...], open_sizes: tuple[int, ...], tmp_path: Path
) -> None:
    names = Dim("rows"), Dim("columns")
    shapes = ({axis: names[index] for index, axis in enumerate(open_sizes)},) if open_sizes else None
    path = tmp_path / "model.onnx"
    _export(Layer(torch.relu), torch.randn(shape), path, torch.float16, shapes)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: torch.randn(shape).numpy()})
    assert found.shape == (*shape[:-1], 24)
