"""An artifact has what is computed of weights alone, in low precision, and not what it is made of."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxamp
from fxamp.export.check import FreshProcess
from tests.models import autocast

WIDTH = 128
X = torch.linspace(-1, 1, 3 * WIDTH).reshape(3, WIDTH)


class Standardised(nn.Module):
    """A layer whose weight has mean 0 and a norm of its own, two biases that are joined, and a table."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.gain = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.rand(WIDTH, 1))
        self.one, self.other = nn.Parameter(torch.randn(WIDTH // 2)), nn.Parameter(torch.randn(WIDTH // 2))

    def forward(self, x: Tensor) -> Any:
        """``(rows, WIDTH)`` of as many."""
        weight = functional.normalize(self.weight - self.weight.mean(1, keepdim=True)) * self.gain
        table = torch.arange(WIDTH, dtype=torch.float32).cos()
        return functional.linear(x * table, weight, torch.cat([self.one, self.other]))


LOW_BYTES = 2 * (WIDTH * WIDTH + WIDTH)
TABLE_BYTES = 4 * WIDTH


def test_pt2_has_the_derived_weights_alone_and_the_bits_of_eager_autocast(
    tmp_path: Path, fresh: FreshProcess
) -> None:
    model, file = Standardised().eval(), tmp_path / "model.pt2"
    artifact = fxamp.export(model, (X,), file, dtype=torch.bfloat16, device_type="cpu", check=False)
    program = torch.export.load(file)
    assert {name: weight.dtype for name, weight in program.state_dict.items()} == {
        "weight_folded": torch.bfloat16,
        "one_folded": torch.bfloat16,
        "_folded_f32": torch.float32,
    }
    assert artifact.weight_bytes == LOW_BYTES + TABLE_BYTES
    assert file.stat().st_size < model.weight.nbytes  # a float32 weight would not go into it
    assert (artifact.casts, artifact.operators) == (1, 2)
    ((got,),) = fresh.run(file, [((X,), {})])
    with torch.no_grad(), autocast(torch.bfloat16):
        assert torch.equal(got, model(X))


def test_onnx_has_them_too(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    artifact = fxamp.export(Standardised().eval(), (X,), file, dtype=torch.float16, device_type="cpu")
    graph = onnx.load(file).graph
    stored = {weight.name: math.prod(weight.dims) for weight in graph.initializer if weight.dims}
    assert sum(stored.values()) == WIDTH * WIDTH + 2 * WIDTH
    assert artifact.weight_bytes == LOW_BYTES + TABLE_BYTES
    assert sorted(node.op_type for node in graph.node) in (
        ["Cast", "Gemm", "Mul"],
        ["Cast", "Add", "MatMul", "Mul"],
    )


class Huge(nn.Module):
    """A table beyond float16, moved and rounded; the copy is written to, so that the cast does not move."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.full((4, 4), value))

    def forward(self, x: Tensor) -> Any:
        """*x* by the table, its rows in another order."""
        x = x.clone().add_(0)
        return x @ (self.table * 1).flip(0).to(torch.float16)


def _exported(model: nn.Module, file: Path, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxamp.ExportWarning)
        return fxamp.export(
            model.eval(), (torch.ones(2, 4),), file, dtype=torch.float16, device_type="cpu", **options
        )


def test_what_does_not_fit_is_found_in_what_was_rounded_before(tmp_path: Path) -> None:
    file = tmp_path / "model.pt2"
    assert _exported(Huge(6e4), file).findings == ()
    with pytest.raises(fxamp.ExportError, match=r"table_folded .*overflows to inf in f16"):
        _exported(Huge(7e4), file, fit="error")
    _exported(Huge(7e4), file, fit="clamp")
    (table,) = torch.export.load(file).state_dict.values()
    assert (table == torch.finfo(torch.float16).max).all()
