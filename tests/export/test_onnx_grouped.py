"""Products of rows by the matrix of their group: as many as there are groups, of whatever size."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import fxamp

NAME = "transformers::grouped_mm_fallback"


def grouped(rows: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """What transformers' operator of that name gives."""
    result = torch.zeros(rows.size(0), weight.size(2), dtype=rows.dtype)
    for group, (start, end) in enumerate(itertools.pairwise([0, *offs.tolist()])):
        result[start:end] = rows[start:end] @ weight[group]
    return result


@pytest.fixture(scope="module", autouse=True)
def operator() -> None:
    """Transformers' own operator where that is installed and imported, else one of the same name."""
    if NAME not in torch._C._dispatch_get_all_op_names():
        made: Any = torch.library.custom_op(
            NAME, grouped, mutates_args=(), schema="(Tensor input, Tensor weight, Tensor offs) -> Tensor"
        )
        made.register_fake(lambda rows, weight, offs: rows.new_empty(rows.size(0), weight.size(2)))


class Experts(nn.Module):
    """Three experts, after a layer in low precision."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.weight = nn.Linear(4, 6), nn.Parameter(torch.randn(3, 6, 5))

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        rows = self.linear(x)
        return torch.ops.transformers.grouped_mm_fallback(rows, self.weight.to(rows.dtype), offs)  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("ends", [(2, 3, 7), (0, 7, 7), (0, 0, 0), (1, 4, 5)], ids=str)
def test_groups_of_any_size_and_rows_behind_the_last(
    ends: tuple[int, ...], dtype: torch.dtype, tmp_path: Path
) -> None:
    path, model = tmp_path / "model.onnx", Experts().eval()
    x, offs = torch.randn(7, 4), torch.tensor([2, 3, 7], dtype=dtype)
    fxamp.export(
        model, (x, offs), path, dtype=torch.float16, device_type="cpu",
        dynamic_shapes=({0: Dim("rows", min=2)}, None),
    )  # fmt: skip
    found = Counter(node.op_type for node in onnx.load(path).graph.node)
    assert found["MatMul"] == 3
    session = onnxruntime.InferenceSession(path)
    for rows in (7, 9):
        x, offs = torch.randn(rows, 4), torch.tensor(ends, dtype=dtype)
        with torch.no_grad(), torch.autocast("cpu", torch.float16):
            wanted = model(x, offs)
        (got,) = session.run(None, {"x": x.numpy(), "offs": offs.numpy()})
        np.testing.assert_allclose(got, wanted.numpy(), rtol=2e-3, atol=2e-3)
        assert not got[ends[-1] :].any()
