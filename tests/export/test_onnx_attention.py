"""Attention as ONNX operators: every kind of mask, shape and size, as near as torch's kernel is to itself."""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import fxamp

FAR = 3.0  # the deviation of queries and keys: scores of 30, which low precision would round by 0.01
NEAR = {torch.float16: 67.0, torch.bfloat16: 50.0}  # decibels; the exporter's translation has 57 and 39


class Attention(nn.Module):
    """Nothing else."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        attended: Tensor = nn.functional.scaled_dot_product_attention(query, key, value, mask, **self.options)
        return attended


def _heads(
    *batch: int, queries: int = 7, keys: int = 9, size: int = 24, of_keys: tuple[int, ...] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    grouped = batch if of_keys is None else of_keys
    return (
        torch.randn(*batch, queries, size) * FAR,
        torch.randn(*grouped, keys, size) * FAR,
        torch.randn(*grouped, keys, 8),
    )


def _mask(*shape: int) -> Tensor:
    """Half of it true; nothing of one row."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(0)) > 0.5
    mask[..., 2, :] = False
    return mask


def _export(
    call: tuple[Tensor, ...], path: Path, dtype: torch.dtype, shapes: Any = None, **options: Any
) -> str:
    """What the check says."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxamp.ExportWarning)  # of bfloat16 kernels, of an infinity in a mask
        model = Attention(**options).eval()
        return fxamp.export(
            model, call, path, dtype=dtype, device_type="cpu", dynamic_shapes=shapes, inputs="low"
        ).check


def _decibels(check: str) -> float:
    assert "finite" not in check
    found = re.search(r"([\d.]+) dB", check)
    return float(found[1]) if found else math.inf


FLOAT = torch.zeros(2, 1, 7, 9).masked_fill(~_mask(2, 1, 7, 9), -math.inf)

CALLS: dict[str, tuple[tuple[Tensor, ...], dict[str, Any]]] = {
    "plain": (_heads(2, 3), {}),
    "causal": (_heads(2, 3), {"is_causal": True}),
    "causal, more queries than keys": (_heads(2, 3, queries=12), {"is_causal": True}),
    "a bool mask, one row of it empty": ((*_heads(2, 3), _mask(2, 1, 7, 9)), {}),
    "a mask of all heads": ((*_heads(2, 3), _mask(7, 9)), {}),
    "a mask that is added, one row of it empty": ((*_heads(2, 3), FLOAT), {}),
    "a scale of its own": (_heads(2, 3), {"scale": 0.3}),
    "grouped heads": (_heads(2, 6, of_keys=(2, 2)), {"enable_gqa": True}),
    "grouped heads and a mask": (
        (*_heads(2, 6, of_keys=(2, 2)), _mask(2, 1, 7, 9)), {"enable_gqa": True}),
    "two dimensions": (_heads(), {}),
    "three dimensions": (_heads(3), {}),
    "five dimensions": (_heads(2, 2, 3), {}),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float16) for name in CALLS),
        *((name, torch.bfloat16) for name in ("plain", "grouped heads and a mask")),
    ],
)
def test_attention_is_near(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    call, options = CALLS[name]
    assert _decibels(_export(call, tmp_path / "model.onnx", dtype, **options)) >= NEAR[dtype]


def test_sizes_may_change(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    batch, queries, keys = Dim("batch"), Dim("queries"), Dim("keys")
    shapes = ({0: batch, 2: queries}, {0: batch, 2: keys}, {0: batch, 2: keys})
    _export(_heads(2, 3), path, torch.float16, shapes, is_causal=True)
    call = _heads(3, 3, queries=5, keys=4)

    got = _run(path, call)

    half = [tensor.half() for tensor in call]
    wanted = nn.functional.scaled_dot_product_attention(half[0], half[1], half[2], is_causal=True)
    noise = (got.double() - wanted.double()).norm() / wanted.double().norm()
    assert -20 * math.log10(max(float(noise), 1e-9)) >= NEAR[torch.float16]


def _run(path: Path, call: tuple[Tensor, ...]) -> Tensor:
    import onnxruntime  # noqa: PLC0415  slow to load

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [port.name for port in session.get_inputs()]
    given = {name: tensor.half().numpy() for name, tensor in zip(names, call, strict=True)}
    return torch.from_numpy(session.run(None, given)[0])


def test_scores_and_what_they_weigh_are_in_float32_between_four_casts(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    _export(_heads(2, 3), path, torch.float16)

    found = Counter(node.op_type for node in onnx.load(path).graph.node)
    assert found == {"Cast": 4, "Mul": 1, "Transpose": 1, "MatMul": 2, "Softmax": 1}


def test_what_the_model_loses_is_not_hidden(tmp_path: Path) -> None:
    query, key, value = _heads(2, 3)
    query[0, 0, 0, 0] = math.nan
    check = _export((query, key, value, _mask(7, 9)), tmp_path / "model.onnx", torch.float16)
    assert "8 elements are finite in neither" in check
