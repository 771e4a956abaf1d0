"""``amp.report()`` is a value, prints the same everywhere, and counts what the graphs do."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp.runtime.report import Report
from tests.counts import Counts
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
    assert removed.what == "removed"
    assert "dtype that its argument already has" in removed.condition
    assert report.eager_casts == sum(report.casts)  # the model wrote it, and for eager it is none either
    assert "removed from graph 0" in str(report)


class ThreeWays(nn.Module):
    """One value that three operators read in low precision."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.q, self.k, self.v = (nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """A tensor like *x*, ``[batch, 4]``."""
        x = self.norm(x)
        y: Tensor = self.q(x) + self.k(x) + self.v(x)
        return y


def test_each_operator_has_the_casts_that_it_was_spared() -> None:
    amp = fxamp.convert(ThreeWays().eval(), dtype=torch.bfloat16, dynamic_shapes=False)
    with torch.no_grad():
        amp(torch.randn(3, 4))
    report = amp.report()
    rows = {row.where.module: row for row in report.operators if row.op == "aten::linear"}
    assert [str(cast) for cast in rows["q"].casts] == ["layer_norm f32->bf16", "q.weight f32->bf16"]
    assert rows["q"].removed == ()
    for module in "kv":
        (removed,) = rows[module].removed
        assert removed.what == "shared with %layer_norm_bf16"
        assert removed.by == "share-casts"
        assert removed.condition == "nobody writes to the value in between, or to the casts"
        assert removed.bytes == 3 * 4 * 2
        assert removed.where.module == module
    weights, activation = 3 * 4 * 4 * 2, 3 * 4 * 2
    assert (report.casts, report.cast_bytes) == ((4,), weights + activation)
    assert (report.eager_casts, report.eager_cast_bytes) == (6, weights + 3 * activation)
    told = (
        "by share-casts, since nobody writes to the value in between, or to the casts: 2: %layer_norm_bf16_1"
    )
    assert f"removed from graph 0 {told}, %layer_norm_bf16_2" in str(report)
    assert "none to bf16:" in str(report)


def test_a_cast_that_was_moved_counts_once() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(16, 16, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = sum(self.f(row) for row in x.unbind(0))
            return y

    model, rows = Rows().eval(), torch.randn(5, 2, 16)
    amp = fxamp.convert(model, dtype=torch.bfloat16, dynamic_shapes=False)
    with torch.no_grad():
        amp(rows)
        with torch.autocast("cpu", torch.bfloat16), Counts(()) as eager:
            model(rows)
    report = amp.report()
    assert (report.casts, report.eager_casts, eager.casts) == ((2,), 6, 6)
    assert [cast.what for cast in report.graphs[0].removed] == ["moved to %x"] * 5
    assert {cast.by for cast in report.graphs[0].removed} == {"place-casts"}


def test_a_frozen_model_tells_which_casts_of_weights_it_is_spared() -> None:
    amp = fxamp.convert(ThreeWays(), dtype=torch.bfloat16, dynamic_shapes=False)
    frozen = fxamp.freeze(amp, (torch.randn(3, 4),))
    report = frozen.report()
    folded = [cast for cast in report.graphs[0].removed if cast.by == "fold-weight-casts"]
    assert [cast.what for cast in folded] == [
        f"read from the rounded copy of %{name}_weight" for name in "qkv"
    ]
    assert {cast.condition for cast in folded} == {"the weight does not change"}
    assert (report.casts, report.cast_bytes) == ((1,), 3 * 4 * 2)
    assert (report.eager_casts, report.eager_cast_bytes) == (6, 3 * 4 * 4 * 2 + 3 * 3 * 4 * 2)


def test_what_runs_in_a_checkpoint_is_told_too() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.g = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.g(checkpoint(self.f, x, use_reentrant=False))
            return y

    model, x = Checkpointed(), torch.randn(3, 4, requires_grad=True)
    amp = fxamp.convert(model, dtype=torch.bfloat16, dynamic_shapes=False)
    amp(x)
    with torch.autocast("cpu", torch.bfloat16), Counts(()) as eager:
        model(x)
    report = amp.report()
    assert {row.where.module for row in report.operators} == {"", "f", "g"}
    assert report.casts == (eager.casts,) == (3,)
    assert report.eager_casts == 3
    assert report.cast_bytes == report.eager_cast_bytes == 2 * (4 * 4 + 3 * 4 + 4 * 4)


def test_an_override_is_told_with_its_reason() -> None:
    policy = fxamp.Policy.native("cpu", torch.bfloat16).keep("float32", module="0", why="logits")
    amp = fxamp.convert(nn.Sequential(nn.Linear(4, 4)), policy=policy)
    amp(torch.randn(2, 4))
    (row,) = amp.report().operators
    assert (row.policy, row.reason) == ("fp32", "override keep float32 (module='0'): logits")


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
    assert [graph["eager_casts"] for graph in read["graphs"]] == [7]
    assert all(row["removed"] == [] for row in read["operators"])
    assert report._repr_html_().startswith("<pre")


def test_nothing_captured_is_an_empty_report() -> None:
    report = fxamp.convert(nn.Linear(4, 4), dtype=torch.bfloat16).report()
    assert report.operators == ()
    assert "0 graphs, 0 casts" in str(report)
