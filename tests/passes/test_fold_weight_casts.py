"""A cast of a weight becomes a source of its own, behind views too; all other casts stay."""

from __future__ import annotations

from collections.abc import Callable
from textwrap import dedent

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import fxamp
from fxamp.ir.text import show
from fxamp.passes.fold_weight_casts import FoldWeightCasts
from fxamp.passes.verify import Verify
from tests.counts import Counts
from tests.models import autocast
from tests.passes.checks import prepared


class _Weights(nn.Module):
    """A weight and a buffer, for the forward of a child class."""

    b: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 4))
        self.register_buffer("b", torch.ones(4, 4))


def _check(model: nn.Module, text: str, *weights: str, x: Tensor | None = None) -> None:
    ready = prepared(Verify, model, torch.ones(2, 4) if x is None else x)
    fold = FoldWeightCasts(dict.fromkeys(weights, True))
    assert fold.run(ready.module.graph)
    assert show(ready.module.graph) == dedent(text).strip()
    assert not fold.run(ready.module.graph)


class Linear(_Weights):
    """Two uses of the weight, one of the buffer."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return functional.linear(functional.linear(x, self.w), self.w) + functional.linear(x, self.b)


def test_all_casts_of_a_weight_are_one_source_and_those_of_other_tensors_stay() -> None:
    _check(
        Linear(),
        """
        %x: f32[2, 4] = input
        %w_low: bf16[4, 4] = w_bf16
        %x_bf16: bf16[2, 4] = to(%x, bf16)
        %linear: bf16[2, 4] = linear(%x_bf16, %w_low)
        %linear_1: bf16[2, 4] = linear(%linear, %w_low)
        %b: f32[4, 4] = b
        %b_bf16: bf16[4, 4] = to(%b, bf16)
        %linear_2: bf16[2, 4] = linear(%x_bf16, %b_bf16)
        %add: bf16[2, 4] = add(%linear_1, %linear_2)
        return [%add]
        """,
        "w",
    )


class Both(_Weights):
    """The weight is rounded, and used as it is."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return functional.linear(x, self.w) + self.w.sum()


def test_a_weight_that_is_used_as_it_is_stays_beside_its_copy() -> None:
    _check(
        Both(),
        """
        %x: f32[2, 4] = input
        %w: f32[4, 4] = w
        %w_low: bf16[4, 4] = w_bf16
        %x_bf16: bf16[2, 4] = to(%x, bf16)
        %linear: bf16[2, 4] = linear(%x_bf16, %w_low)
        %sum_1: f32[] = sum(%w)
        %add: bf16[2, 4] = add(%linear, %sum_1)
        return [%add]
        """,
        "w",
    )


class Viewed(_Weights):
    """The weight is turned, and cut in the second dimension."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return x @ self.w.t() + x @ self.w[:, :2].repeat(1, 2)


def test_a_cast_behind_a_view_with_all_elements_is_folded_and_one_behind_columns_is_not() -> None:
    _check(
        Viewed(),
        """
        %x: f32[2, 4] = input
        %w: f32[4, 4] = w
        %w_low: bf16[4, 4] = w_bf16
        %t_1: bf16[4, 4] = t(%w_low)
        %x_bf16: bf16[2, 4] = to(%x, bf16)
        %matmul: bf16[2, 4] = matmul(%x_bf16, %t_1)
        %slice_1: f32[4, 2] = slice(%w, 1, 0, 2)
        %repeat: f32[4, 4] = repeat(%slice_1, [1, 2])
        %repeat_bf16: bf16[4, 4] = to(%repeat, bf16)
        %matmul_1: bf16[2, 4] = matmul(%x_bf16, %repeat_bf16)
        %add: bf16[2, 4] = add(%matmul, %matmul_1)
        return [%add]
        """,
        "w",
    )


def test_a_spread_weight_is_not_cast_and_lies_in_memory_as_its_cast_would() -> None:
    model = SpreadOverBatch().eval()
    frozen = fxamp.freeze(fxamp.convert(model, dtype=torch.bfloat16), (torch.ones(2, 4),))
    for rows in (2, 3, 5):
        x = torch.randn(rows, 4)
        with torch.no_grad(), autocast(torch.bfloat16):
            expected = model(x)
        with Counts(()) as counts:
            found = frozen(x)
        assert torch.equal(found, expected)
        assert counts.casts == 1
    assert set(frozen.state_dict()) == {"w"}
    assert frozen.state_dict()["w"].dtype is torch.bfloat16


class SpreadOverBatch(nn.Module):
    """A token for every row, as a classifier's head has it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(1, 1, 4))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        tokens = self.w.expand(x.shape[0], -1, -1).reshape(x.shape[0], 1, 2, 2).permute(0, 2, 1, 3)
        return torch.matmul(tokens, x.view(-1, 2, 2, 1))


class Rows(_Weights):
    """Rows of the weight, and a gather of them."""

    write = False

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        gathered = self.w[torch.tensor([0, 0, 1, 2])]
        if self.write:
            gathered.view(16).mul_(2)
        return functional.linear(x, self.w[0:2]).repeat(1, 2) + x @ gathered


def test_rows_and_gathers_are_taken_from_the_copy() -> None:
    _check(
        Rows(),
        """
        %x: f32[2, 4] = input
        %_constant0: i64[4] = _constant0
        %clone: i64[4] = clone(%_constant0)
        %w_low: bf16[4, 4] = w_bf16
        %index_1: bf16[4, 4] = index(%w_low, [%clone])
        %slice_2: bf16[2, 4] = slice(%w_low, 0, 0, 2)
        %x_bf16: bf16[2, 4] = to(%x, bf16)
        %linear: bf16[2, 2] = linear(%x_bf16, %slice_2)
        %repeat: bf16[2, 4] = repeat(%linear, [1, 2])
        %matmul: bf16[2, 4] = matmul(%x_bf16, %index_1)
        %add: bf16[2, 4] = add(%repeat, %matmul)
        return [%add]
        """,
        "w",
    )


def test_a_gather_that_is_written_to_is_cast_as_before() -> None:
    model = Rows()
    model.write = True
    _check(
        model,
        """
        %x: f32[2, 4] = input
        %_constant0: i64[4] = _constant0
        %clone: i64[4] = clone(%_constant0)
        %w: f32[4, 4] = w
        %w_low: bf16[4, 4] = w_bf16
        %index: f32[4, 4] = index(%w, [%clone])
        %view: f32[16] = view(%index, [16])
        %mul_: f32[16] = mul_(%view, 2)
        %slice_2: bf16[2, 4] = slice(%w_low, 0, 0, 2)
        %x_bf16: bf16[2, 4] = to(%x, bf16)
        %linear: bf16[2, 2] = linear(%x_bf16, %slice_2)
        %repeat: bf16[2, 4] = repeat(%linear, [1, 2])
        %index_bf16: bf16[4, 4] = to(%index, bf16)
        %matmul: bf16[2, 4] = matmul(%x_bf16, %index_bf16)
        %add: bf16[2, 4] = add(%repeat, %matmul)
        return [%add]
        """,
        "w",
    )


class Parts(nn.Module):
    """A weight whose rows are taken apart, as attention does with its three projections."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2 * width, 16))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        one, other = self.w.chunk(2)
        return functional.linear(x, one) + functional.linear(x, other) + functional.linear(x, one)


def test_parts_of_a_weight_are_parts_of_the_copy() -> None:
    _check(
        Parts(2),
        """
        %x: f32[2, 16] = input
        %w_low: bf16[4, 16] = w_bf16
        %chunk_1: (bf16[2, 16], bf16[2, 16]) = chunk(%w_low, 2)
        %getitem_2: bf16[2, 16] = getitem(%chunk_1, 0)
        %getitem_3: bf16[2, 16] = getitem(%chunk_1, 1)
        %x_bf16: bf16[2, 16] = to(%x, bf16)
        %linear: bf16[2, 2] = linear(%x_bf16, %getitem_2)
        %linear_1: bf16[2, 2] = linear(%x_bf16, %getitem_3)
        %add: bf16[2, 2] = add(%linear, %linear_1)
        %linear_2: bf16[2, 2] = linear(%x_bf16, %getitem_2)
        %add_1: bf16[2, 2] = add(%add, %linear_2)
        return [%add_1]
        """,
        "w",
        x=torch.ones(2, 16),
    )


def test_rows_that_begin_where_no_allocation_does_are_cast_as_before() -> None:
    ready = prepared(Verify, Parts(1), torch.ones(2, 16))
    assert FoldWeightCasts({"w": True}).run(ready.module.graph)
    assert "getitem_1_bf16: bf16[1, 16] = to(%getitem_1, bf16)" in show(ready.module.graph)


class Asked(_Weights):
    """The model rounds the weight by itself."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return functional.linear(x, self.w.to(torch.bfloat16).float())


def test_a_cast_that_the_model_asks_for_stays() -> None:
    ready = prepared(Verify, Asked(), torch.ones(2, 4))
    before = show(ready.module.graph)
    assert not FoldWeightCasts({"w": True}).run(ready.module.graph)
    assert show(ready.module.graph) == before


_INDEX = torch.tensor([2, 0, 2, 1])
MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "turn": lambda w: w.t(),
    "regroup": lambda w: w.reshape(-1, 2),
    "some rows": lambda w: w[1:3],
    "every other row": lambda w: w[::2],
    "one row": lambda w: w[1].unsqueeze(1),
    "columns": lambda w: w[:, :2],
    "gather": lambda w: w[_INDEX % w.shape[0]],
    "gather columns": lambda w: w[:, _INDEX % w.shape[1]],
    "embed": lambda w: functional.embedding(_INDEX % w.shape[0], w),
    "gather and write": lambda w: w[_INDEX % w.shape[0]].mul_(3),
    "gather and write to a view": lambda w: _written(w[_INDEX % w.shape[0]]),
    "first part": lambda w: w.chunk(2)[0],
    "last part": lambda w: w.split(3)[-1],
    "part of columns": lambda w: w.chunk(2, 1)[-1],
    "one of all rows": lambda w: w.unbind()[0].unsqueeze(0),
    "spread a row": lambda w: w[:1].expand(4, -1),
    "spread a column": lambda w: w[:, 1:2].expand(-1, 3),
    "spread and regroup": lambda w: w.unsqueeze(1).expand(-1, 2, -1).flatten(1),
    "repeat": lambda w: w.repeat(2, 1),
    "turn and gather": lambda w: w.t().index_select(0, _INDEX % w.shape[1]),
}


def _written(w: Tensor) -> Tensor:
    w.view(-1).add_(1)
    return w


class Moved(nn.Module):
    """Multiplies by a weight that is moved first, and returns the moved weight too."""

    def __init__(self, moves: tuple[str, ...], *, turned: bool) -> None:
        super().__init__()
        weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
        self.w = nn.Parameter(weight.t() if turned else weight)
        self.moves = moves

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        w: Tensor = self.w
        for move in self.moves:
            w = MOVES[move](w)
        return functional.linear(w.t().contiguous().t(), x[:, : w.shape[1]]).sum() + x[:, : w.shape[0]] @ w


def _leaves_something(model: Moved) -> bool:
    """Whether the moves can be made one after the other, and give a tensor that is not empty."""
    w = model.w.detach().clone()
    try:
        for move in model.moves:
            w = MOVES[move](w)
    except (IndexError, RuntimeError, ZeroDivisionError):
        return False
    return bool(w.numel())


@settings(max_examples=40, derandomize=True, deadline=None, database=None)
@given(st.lists(st.sampled_from(tuple(MOVES)), max_size=4).map(tuple), st.booleans())
def test_a_moved_weight_gives_the_bits_of_eager_autocast(moves: tuple[str, ...], turned: bool) -> None:
    model, x = Moved(moves, turned=turned).eval(), torch.randn(3, 512)
    assume(_leaves_something(model))
    with torch.no_grad():
        with autocast(torch.bfloat16):
            expected = model(x)
        frozen = fxamp.freeze(fxamp.convert(model, dtype=torch.bfloat16), (x,))
        assert torch.equal(frozen(x), expected)
        assert frozen.eager_modules == ()
