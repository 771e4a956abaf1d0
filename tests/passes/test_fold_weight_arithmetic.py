"""What depends on weights and constants alone becomes a source of its own; everything else stays."""

from __future__ import annotations

from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph
from torch.nn import functional

from fxamp.ir.blocks import is_source
from fxamp.ir.edits import edits_of
from fxamp.ir.text import show
from fxamp.passes.fold_weight_arithmetic import SHARE, SMALL, FoldWeightArithmetic
from fxamp.passes.fold_weight_casts import FoldWeightCasts
from fxamp.passes.verify import Verify
from tests.passes.checks import Prepared, prepared

ROWS, BIG = 2, 256  # a weight of BIG x BIG float32 elements is larger than SMALL


class _Weights(nn.Module):
    """Two weights and a buffer, for the forward of a child class."""

    b: Tensor

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(size, size))
        self.gain = nn.Parameter(torch.ones(size, 1))
        self.register_buffer("b", torch.ones(size, size))


def _folded(model: nn.Module, *args: Any) -> Prepared:
    """The graph of *model*, after both passes."""
    with torch.no_grad():
        ready = prepared(Verify, model, *args)
    graph = ready.module.graph
    weights = dict.fromkeys(dict(model.named_parameters()), True)
    FoldWeightCasts(weights).run(graph)
    buffers = dict(model.named_buffers())
    fixed = frozenset(str(n.target) for n in graph.nodes if is_source(n) and n.target not in buffers)
    step = FoldWeightArithmetic(fixed)
    step.run(graph)
    _lint(graph)
    text = show(graph)
    assert not step.run(graph), "a second run changed something"
    assert show(graph) == text
    return ready


def _lint(graph: Graph) -> None:
    """Without the module, which does not have the new tensors yet."""
    alone = Graph()
    alone.output(alone.graph_copy(graph, {}))
    alone.lint()


def _check(model: nn.Module, text: str, x: Tensor | None = None) -> Prepared:
    ready = _folded(model, torch.ones(ROWS, 4) if x is None else x)
    found = show(ready.module.graph)
    assert found == dedent(text).strip(), found
    return ready


class Standardised(_Weights):
    """The weight has mean 0 before it is used."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return functional.linear(x, (self.w - self.w.mean(1, keepdim=True)) * self.gain)


def test_the_arithmetic_and_the_cast_behind_it_are_one_source() -> None:
    ready = _check(
        Standardised(),
        """
        %x: f32[2, 4] = input
        %mul_bf16_once: bf16[4, 4] = w_folded
        %x_bf16: bf16[2, 4] = to(%x, bf16)
        %linear: bf16[2, 4] = linear(%x_bf16, %mul_bf16_once)
        return [%linear]
        """,
    )
    derivation = ready.node("mul_bf16_once").meta["derived"]
    assert derivation.sources == ("w", "gain")
    assert (
        show(derivation.graph)
        == dedent(
            """
        %w: f32[4, 4] = w
        %gain: f32[4, 1] = gain
        %mean: f32[4, 1] = mean(%w, [1], True)
        %sub: f32[4, 4] = sub(%w, %mean)
        %mul: f32[4, 4] = mul(%sub, %gain)
        %mul_bf16: bf16[4, 4] = to(%mul, bf16)
        return [%mul_bf16]
        """
        ).strip()
    )


def test_each_operator_that_is_gone_is_told_of() -> None:
    ready = _folded(Standardised(), torch.ones(ROWS, 4))
    told = {edit.node: edit for edit in edits_of(ready.module) if edit.by == "fold-weight-arithmetic"}
    assert set(told) == {"mean", "sub", "mul", "mul_bf16"}
    assert {edit.what for edit in told.values()} == {"computed once, for %mul_bf16"}
    assert {edit.condition for edit in told.values()} == {"the weights do not change"}


class Views(_Weights):
    """A weight and what is made of it, turned; and two rows of what is made of it."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return x @ self.w.t() + x @ self.w.exp().t() + self.w.exp()[:2]


def test_a_view_alone_is_no_arithmetic_and_stays_behind_what_is_kept() -> None:
    _check(
        Views(),
        """
        %x: f32[2, 4] = input
        %w_low: bf16[4, 4] = w_bf16
        %t_2: bf16[4, 4] = t(%w_low)
        %x_bf16: bf16[2, 4] = to(%x, bf16)
        %matmul: bf16[2, 4] = matmul(%x_bf16, %t_2)
        %t_1_bf16_once: bf16[4, 4] = w_folded
        %matmul_1: bf16[2, 4] = matmul(%x_bf16, %t_1_bf16_once)
        %add: bf16[2, 4] = add(%matmul, %matmul_1)
        %exp_1_once: f32[4, 4] = w_folded_1
        %slice_1: f32[2, 4] = slice(%exp_1_once, 0, 0, 2)
        %add_1: f32[2, 4] = add(%add, %slice_1)
        return [%add_1]
        """,
    )


class Factories(nn.Module):
    """A table of positions and a mask, of fixed size."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        table = torch.arange(4, dtype=torch.float32).mul(0.5).cos()
        mask = torch.ones(4, 4, dtype=torch.bool).tril()
        return (x * table).unsqueeze(-1).masked_fill(mask, 0)


def test_tables_of_a_fixed_size_are_sources() -> None:
    _check(
        Factories(),
        """
        %x: f32[2, 4] = input
        %cos_once: f32[4] = _folded_f32
        %tril_once: b8[4, 4] = _folded_b8
        %mul_1: f32[2, 4] = mul(%x, %cos_once)
        %unsqueeze: f32[2, 4, 1] = unsqueeze(%mul_1, -1)
        %masked_fill: f32[2, 4, 4] = masked_fill(%unsqueeze, %tril_once, 0)
        return [%masked_fill]
        """,
    )


class Sized(nn.Module):
    """A table as long as the input."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return x * torch.arange(x.shape[0]).unsqueeze(1).add(1)


def test_a_size_that_varies_keeps_the_table_in_the_graph() -> None:
    import fxamp  # noqa: PLC0415

    frozen = fxamp.freeze(fxamp.convert(Sized(), dtype=torch.bfloat16), (torch.ones(3, 4),))
    assert "arange(%sym_size_int" in show(frozen.graph_module)
    for rows in (3, 5):
        assert torch.equal(frozen(torch.ones(rows, 4)), Sized()(torch.ones(rows, 4)))


class Twice(_Weights):
    """The same computation, in two layers."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        for _ in range(2):
            x = x * torch.arange(4).float().cos() + self.w.exp().sum()
        return x


def test_equal_computations_are_one_source() -> None:
    text = show(_folded(Twice(), torch.ones(ROWS, 4)).module.graph)
    assert "_folded_1" not in text
    assert [line for line in text.splitlines() if " = " in line and "_folded" in line] == [
        "%cos_once: f32[4] = _folded_f32",
        "%sum_1_once: f32[] = w_folded",
    ]


class Filled(_Weights):
    """A mask is filled, a copy of a weight in part, and a result is clipped in place."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        mask = torch.zeros(4, 4)
        mask[:, 1:].fill_(-1.0).tril_()
        bias = self.gain.clone()
        bias[1:2].zero_()
        return functional.linear(x, mask + 1) + (self.w * 2).relu_()[:2] + mask[0] + bias.bfloat16().t()


def test_writes_to_what_nobody_else_has_are_a_part_of_the_computation() -> None:
    ready = _check(
        Filled(),
        """
        %x: f32[2, 4] = input
        %zeros_once: f32[4, 4] = _folded_f32
        %add_bf16_once: bf16[4, 4] = _folded_bf16
        %x_bf16: bf16[2, 4] = to(%x, bf16)
        %linear: bf16[2, 4] = linear(%x_bf16, %add_bf16_once)
        %mul_once: f32[4, 4] = w_folded
        %slice_3: f32[2, 4] = slice(%mul_once, 0, 0, 2)
        %add_1: f32[2, 4] = add(%linear, %slice_3)
        %select: f32[4] = select(%zeros_once, 0, 0)
        %add_2: f32[2, 4] = add(%add_1, %select)
        %to_once: bf16[4, 1] = gain_folded
        %t: bf16[1, 4] = t(%to_once)
        %add_3: f32[2, 4] = add(%add_2, %t)
        return [%add_3]
        """,
    )
    text = show(ready.node("zeros_once").meta["derived"].graph)
    assert [line.split(" = ")[1] for line in text.splitlines()[:-1]] == [
        "zeros([4, 4], device=device(type='cpu'), pin_memory=False)",
        "slice(%zeros, 1, 1, 9223372036854775807)",
        "fill_(%slice_1, -1.0)",
        "tril_(%slice_1)",
    ]


# --- what stays ---------------------------------------------------------------------------------------


class Returned(_Weights):
    """What is made of the weight is given to the user, as a view."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        made = (self.w * 2).exp()
        return x + made[:2], made.t()


def test_what_the_user_is_given_is_a_clone() -> None:
    folded = _folded(Returned(), torch.ones(ROWS, 4)).module.graph
    assert (
        show(folded)
        == dedent(
            """
        %x: f32[2, 4] = input
        %exp_once: f32[4, 4] = w_folded
        %exp_own: f32[4, 4] = clone(%exp_once)
        %slice_1: f32[2, 4] = slice(%exp_own, 0, 0, 2)
        %add: f32[2, 4] = add(%x, %slice_1)
        %t: f32[4, 4] = t(%exp_own)
        return [%add, %t]
        """
        ).strip()
    )


class Written(_Weights):
    """What is made of the weight is written to, through a view."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        made = (self.w * 2).exp()
        made[0].add_(x[0])
        return x + made[:2]


class ReadBefore(_Weights):
    """What is made of the weight is used before it is written to, and after."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        made = (self.w * 2).exp()
        x = x + made[:2]
        made.mul_(0.5)
        return x + made[:2]


class GivenAway(_Weights):
    """What is made of the weight is written to, and returned."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        made = (self.w * 2).exp()
        made[0].zero_()
        return x + made[:2], made


class Buffered(_Weights):
    """A buffer takes part."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return x + (self.w * 2).mul(self.b)[:2]


class Random(_Weights):
    """Noise is added to the weight."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return x + torch.rand_like(self.w * 2)[:2] + torch.bernoulli(self.w * 2)[:2]


class Uninitialised(_Weights):
    """Memory is asked for, and filled."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return x + torch.empty_like(self.w * 2)[:2].mul(0)


@pytest.mark.parametrize(
    ("model", "stays"),
    [
        (Written(), "%exp: f32[4, 4] = exp(%mul_once)"),
        (ReadBefore(), "%exp: f32[4, 4] = exp(%mul_once)"),
        (GivenAway(), "%exp: f32[4, 4] = exp(%mul_once)"),
        (Buffered(), "%mul_1: f32[4, 4] = mul(%mul_once, %b)"),
        (Random(), "%rand_like: f32[4, 4] = rand_like(%mul_once, pin_memory=False)"),
        (Random(), "%bernoulli: f32[4, 4] = bernoulli(%mul_once)"),
        (Uninitialised(), "%empty_like: f32[4, 4] = empty_like(%mul_once, pin_memory=False)"),
    ],
    ids=[
        "written",
        "read before",
        "given away",
        "buffer",
        "random",
        "bernoulli",
        "uninitialised",
    ],
)
def test_what_is_not_the_same_in_every_call_or_not_private_stays(model: nn.Module, stays: str) -> None:
    text = show(_folded(model, torch.ones(ROWS, 4)).module.graph)
    assert stays in text, text


class Spread(_Weights):
    """A column that is spread over many columns."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return x + (self.gain.exp().expand(4, SMALL) * 2).sum(1)


def test_a_value_that_is_larger_than_what_it_is_made_of_stays() -> None:
    _check(
        Spread(),
        """
        %x: f32[2, 4] = input
        %sum_1_once: f32[4] = gain_folded
        %add: f32[2, 4] = add(%x, %sum_1_once)
        return [%add]
        """,
    )

    class Kept(Spread):
        def forward(self, x: Tensor) -> Tensor:
            return x.unsqueeze(-1) + self.gain.exp().expand(4, SMALL) * 2

    text = show(_folded(Kept(), torch.ones(ROWS, 4)).module.graph)
    assert "%exp_once: f32[4, 1] = gain_folded" in text
    assert f"%expand: f32[4, {SMALL}] = expand(%exp_once" in text
    assert f"%mul: f32[4, {SMALL}] = mul(%expand, 2)" in text


class Many(_Weights):
    """Three values of the size of the weight."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return x * (self.w * 2) + x * self.w.exp() + x * self.w.cos()


def test_what_is_kept_has_no_more_bytes_than_what_it_is_made_of() -> None:
    model = Many(BIG)
    graph = _folded(model, torch.ones(BIG, BIG)).module.graph
    kept = [node for node in graph.nodes if "derived" in node.meta]
    assert sum(node.meta["fact"].bytes for node in kept) == model.w.nbytes > SMALL
    assert model.w.nbytes + (model.w.nbytes + model.gain.nbytes) // SHARE < 2 * model.w.nbytes
    assert sum(node.op == "call_function" for node in graph.nodes) == 3 + 2 + 2  # two stay


class Gathers(nn.Module):
    """A gather that is larger than ``SMALL`` and than what it is from, beside another weight."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(side, side))
        self.table = nn.Parameter(torch.ones(4, SMALL // 8))

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return x @ self.w.t() + (self.table[[0, 1, 2, 3, 0]] * x.sum()).sum()


@pytest.mark.parametrize("side", [8, 2048])
def test_a_value_may_take_a_fiftieth_of_all_weights_besides(side: int) -> None:
    model = Gathers(side)
    size = 5 * model.table[0].nbytes
    has_room = size <= model.table.nbytes + (model.w.nbytes + model.table.nbytes) // SHARE
    assert has_room is (side == 2048)
    assert size > SMALL
    text = show(_folded(model, torch.ones(ROWS, side)).module.graph)
    assert (" = index(" in text) is not has_room


def test_a_number_that_low_precision_lacks_stays_where_exporters_can_tell_of_it() -> None:
    class Tiny(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.full((4,), 1e-12, dtype=torch.float16)

    assert "full([4], 1e-12" in show(_folded(Tiny(), torch.ones(ROWS, 4)).module.graph)


class CastByTheModel(_Weights):
    """The weight is cast to another dtype in a way that is no ``to.dtype``."""

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        return self.w.to(x.device, torch.bfloat16).repeat(x.shape[0], 1) + x.bfloat16()


def test_a_cast_that_the_model_writes_in_another_way_is_made_once() -> None:
    text = show(_folded(CastByTheModel(), torch.ones(1, 4)).module.graph)
    assert "%w:" not in text
