"""``amp.report()`` is a value, prints the same everywhere, and counts what the graphs do."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

import fxamp
from fxamp.runtime.report import Report
from tests.models import SmallCNN

IMAGES = torch.randn(2, 3, 8, 8)


def _report(model: nn.Module, *args: Tensor) -> Report:
    amp = fxamp.convert(model, dtype=torch.bfloat16)
    amp(*args)
    return amp.report()


def test_a_cast_is_told_once_at_the_first_operator_that_shares_it() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.f(self.f(x))
            return y

    report = _report(Twice(), torch.randn(2, 4))
    casts = [[str(cast) for cast in row.casts] for row in report.operators]
    assert casts == [["x f32->bf16", "f.weight f32->bf16"], []]
    assert [cast.kept for cast in report.operators[0].casts] == [False, True]
    assert sum(map(len, casts)) == sum(report.casts)


def test_bytes_are_those_of_the_tensors() -> None:
    model = nn.Linear(4, 8)
    amp = fxamp.convert(model, dtype=torch.bfloat16, dynamic_shapes=False)
    amp(torch.randn(3, 4))
    report = amp.report()
    (row,) = report.operators
    assert row.bytes == 3 * 8 * 2
    assert sorted(int(cast.bytes) for cast in row.casts) == [8 * 2, 3 * 4 * 2, 4 * 8 * 2]
    assert report.cast_bytes == report.eager_cast_bytes == 2 * (8 + 12 + 32)


def test_bytes_of_symbolic_sizes_are_expressions() -> None:
    (row,) = _report(nn.Linear(4, 8), torch.randn(3, 4)).operators
    (size,) = row.bytes.free_symbols  # type: ignore[union-attr]
    assert row.bytes.subs(size, 3) == 48  # type: ignore[union-attr]


def test_the_casts_that_clean_up_removes_are_named_with_pass_and_condition() -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.f(x.float())
            return y

    report = _report(Kept(), torch.randn(2, 4))
    ((removed,),) = [graph.removed for graph in report.graphs]
    assert (removed.by, removed.dtype, removed.of_autocast) == ("fold-noop-casts", "f32", False)
    assert "dtype that its argument already has" in removed.condition
    assert report.eager_casts == sum(report.casts)  # the model wrote it, and for eager it is none either
    assert "removed from graph 0" in str(report)


def test_segments_say_what_python_reads_between_them() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.f(x)
            return y.relu() if y.sum() > 0 else y.exp()

    report = _report(Reads(), torch.randn(2, 4))
    assert [graph.front_end for graph in report.graphs] == [
        "recorded, a segment",
        "recorded, the operator that is read",
        "recorded, a segment",
    ]
    assert report.graphs[0].reads == "aten::is_nonzero"


def test_modules_below_an_eager_one_have_their_full_path() -> None:
    class Hooked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)
            self.b.register_forward_hook(lambda module, args, out: out * 1.5)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.b(self.a(x))
            return y

    amp = fxamp.convert(Hooked(), dtype=torch.bfloat16)
    for _ in range(2):
        amp(torch.randn(2, 4))
    report = amp.report()
    assert {piece.path for piece in report.eager} == {"", "b"}
    assert {row.where.module for row in report.operators} == {"a.0"}
    assert {graph.path for graph in report.graphs} == {"a"}


def test_it_prints_the_same_whatever_the_terminal_is(monkeypatch: pytest.MonkeyPatch) -> None:
    report = _report(SmallCNN(), IMAGES)
    monkeypatch.setenv("COLUMNS", "40")
    narrow = str(report)
    monkeypatch.setenv("COLUMNS", "200")
    assert str(report) == narrow
    assert "\x1b" not in narrow
    assert max(map(len, narrow.split("lower_precision_fp:", 1)[0].splitlines())) <= 118


def test_operators_stand_below_their_modules() -> None:
    lines = str(_report(SmallCNN(), IMAGES)).splitlines()
    assert lines.index("stem.0") < lines.index("body.0") < lines.index("head")
    assert lines[lines.index("head") + 1].strip().startswith("aten::linear")


def test_json_and_html() -> None:
    report = _report(SmallCNN(), IMAGES)
    read = json.loads(report.to_json())
    assert [row["op"] for row in read["operators"]] == [row.op for row in report.operators]
    assert read["eager_casts"] == report.eager_casts == 7
    assert report._repr_html_().startswith("<pre")


def test_nothing_captured_is_an_empty_report() -> None:
    report = fxamp.convert(nn.Linear(4, 4), dtype=torch.bfloat16).report()
    assert report.operators == ()
    assert "0 graphs, 0 casts" in str(report)
