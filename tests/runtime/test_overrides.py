"""Overrides carried out: each selector and verb, both ways, wherever an operator can be called from.

The expected results are those of eager autocast over a model that says the same by hand.
"""
# ruff: noqa: D101, D102  the models are what they say

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxamp
from fxamp import Policy
from fxamp.policy.site import Site
from fxamp.runtime.dynamo_backend import fxamp_backend
from tests.models import autocast, equal

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
CPU = Policy.native("cpu", BF16)
X = torch.linspace(-2, 2, 24).reshape(3, 8)


def named(value: object) -> str:
    """The name of a test: the same in every process, without the address of a function."""
    if isinstance(value, dict):
        return ", ".join(f"{key}={named(item)}" for key, item in value.items())
    return getattr(value, "__name__", None) or str(value)


def make(cls: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return cls()


def same_as(policy: Policy, model: nn.Module, by_hand: nn.Module, *args: Tensor) -> fxamp.AmpModule:
    """*model* under *policy* does what *by_hand* does under eager autocast; outputs, gradients, buffers."""
    args = args or (X,)
    with autocast(policy.low):
        wanted = by_hand(*args)
    amp = fxamp.convert(model, policy=policy)
    for _ in range(2):
        found = amp(*args)
        assert equal(found, wanted), (found, wanted)
    if wanted.requires_grad:
        wanted.float().sum().backward()
        amp(*args).float().sum().backward()
        names = {name: parameter.grad for name, parameter in by_hand.named_parameters()}
        for name, parameter in model.named_parameters():
            assert equal(parameter.grad, names[name]), name
    return amp


def rule_of(amp: fxamp.AmpModule, op: str) -> list[str]:
    return [row.rule for row in amp.report().operators if row.op == op]


class Two(nn.Module):
    """Two layers; by hand the second in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.norm(self.first(x)))
        return out


class TwoByHand(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x))
        with torch.autocast("cpu", enabled=False):
            out: Tensor = self.second(h.float())
        return out


def in_second(site: Site) -> bool:
    return site.where.module == "second"


@pytest.mark.parametrize(
    "selection",
    [
        {"module": "second"},
        {"module": "s*d"},
        {"module": re.compile("^sec")},
        {"module": "second", "op": torch.ops.aten.linear},
        {"module": "second", "op": "aten::linear"},
        {"module": "second", "op": functional.linear},
        {"where": in_second},
        {"where": in_second, "op": torch.ops.aten.linear.default},
    ],
    ids=named,
)
def test_a_layer_is_kept_in_float32_by_every_selector(selection: dict[str, Any]) -> None:
    amp = same_as(CPU.keep("float32", **selection), make(Two), make(TwoByHand))
    assert amp.eager_modules == ()


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.a(x))
        h = torch.softmax(h, -1)
        out: Tensor = self.b(h)
        return out


class MixedNormInFloat32(Mixed):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.softmax(self.norm(self.a(x).float()), -1)
        out: Tensor = self.b(h)
        return out


@pytest.mark.parametrize(
    "selection",
    [
        {"module": nn.LayerNorm},
        {"op": functional.layer_norm},
        {"op": torch.layer_norm},
        {"op": "aten::layer_norm"},
        {"op": "torch.nn.functional.layer_norm"},
    ],
    ids=named,
)
def test_a_class_of_modules_is_kept_in_float32(selection: dict[str, Any]) -> None:
    same_as(CPU.keep("float32", **selection), make(Mixed), make(MixedNormInFloat32))


class SoftmaxInFloat32(Mixed):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.softmax(self.norm(self.a(x)).float(), -1)
        out: Tensor = self.b(h)
        return out


LINE = Mixed.forward.__code__.co_firstlineno + 2


@pytest.mark.parametrize("where", [f"test_overrides.py:{LINE}", f"{__file__}:{LINE}-{LINE}"])
def test_a_source_line_is_kept_in_float32(where: str) -> None:
    same_as(CPU.keep("float32", where=where), make(Mixed), make(SoftmaxInFloat32))


def test_a_function_of_the_model_is_selected_by_its_name() -> None:
    whole = CPU.keep("float32", where="test_overrides.py:forward", op="aten::softmax")
    same_as(whole, make(Mixed), make(SoftmaxInFloat32))


class Loss(nn.Module):
    """On the CPU ``l1_loss`` has no rule of its own, ``mse_loss`` is float32."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return functional.mse_loss(h, torch.zeros_like(h))


class LossLow(Loss):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.autocast("cpu", enabled=False):
            return functional.mse_loss(h, torch.zeros_like(h))


@pytest.mark.parametrize("selection", [{"op": functional.mse_loss}, {"op": "aten::mse_loss"}], ids=named)
def test_what_autocast_computes_in_float32_is_forced_low(selection: dict[str, Any]) -> None:
    amp = same_as(CPU.force("low", **selection), make(Loss), make(LossLow))
    assert amp(X).dtype is BF16


def test_what_autocast_casts_is_left_alone() -> None:
    same_as(CPU.leave(op="aten::mse_loss"), make(Loss), make(LossLow))


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.w = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.mm(self.a(x), self.w)


class ProductPromoted(Product):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=True, dtype=BF16):
            h = self.a(x)
        with torch.autocast("cpu", enabled=False):
            return torch.mm(h.float(), self.w)


def test_operands_are_promoted_to_the_widest_of_them() -> None:
    amp = same_as(CPU.promote(op="aten::mm"), make(Product), make(ProductPromoted))
    assert amp(X).dtype is F32


class ProductRounded(ProductPromoted):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(BF16)


def test_a_product_is_computed_in_float32_and_returned_low() -> None:
    policy = CPU.keep("float32", returns="low", op=torch.mm)
    amp = same_as(policy, make(Product), make(ProductRounded))
    assert amp(X).dtype is BF16


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        values, _ = torch.max(self.a(x), 1)
        mean = torch.var_mean(self.a(x), 1)
        return values + mean[0] * mean[1]


class SeveralRounded(Several):
    def forward(self, x: Tensor) -> Tensor:
        values, _ = torch.max(self.a(x), 1)
        variance, mean = (part.to(BF16) for part in torch.var_mean(self.a(x).float(), 1))
        return values + variance * mean


def test_each_of_several_results_is_returned_low() -> None:
    same_as(CPU.keep("float32", returns="low", op=torch.var_mean), make(Several), make(SeveralRounded))


# --- where operators are called from --------------------------------------------------------------------


class Disabled(nn.Module):
    """The second product in a region that is switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.autocast("cpu", enabled=False):
            out: Tensor = self.b(h.float())
        return out


class Enabled(Disabled):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x).float())
        return out


@pytest.mark.parametrize("low", [BF16, F16])
def test_an_override_acts_in_a_region_that_is_switched_off(low: torch.dtype) -> None:
    policy = Policy.native("cpu", low).force("low", module="b")
    same_as(policy, make(Disabled), make(Enabled))


class OtherDtype(Disabled):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", F16):
            out: Tensor = self.b(self.a(x))
        return out


class OtherDtypeByHand(Disabled):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", F16):
            h = self.a(x)
        with torch.autocast("cpu", enabled=False):
            out: Tensor = self.b(h.float())
        return out


def test_an_override_acts_in_a_region_of_another_dtype() -> None:
    same_as(CPU.keep("float32", module="b"), make(OtherDtype), make(OtherDtypeByHand))


class Composite(nn.Module):
    """``einsum`` is one operator that calls ``bmm``."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,ij->bj", x, self.w)


class CompositeByHand(Composite):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x)


@pytest.mark.parametrize("op", ["aten::bmm", "aten::einsum", torch.functional.einsum], ids=named)
def test_an_override_reaches_into_a_composite_operator(op: Any) -> None:
    amp = same_as(CPU.keep("float32", op=op), make(Composite), make(CompositeByHand))
    assert amp(X).dtype is F32


class Shared(nn.Module):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.also = self.a

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.a(x) + self.also(x)
        return out


class SharedByHand(Shared):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x)


@pytest.mark.parametrize("path", ["a", "also"])
def test_a_shared_module_is_selected_by_each_of_its_names(path: str) -> None:
    same_as(CPU.keep("float32", module=path), make(Shared), make(SharedByHand))


class Writes(nn.Module):
    """Writes through a view; a cast of the view would lose the write."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.a(x)
        h.view(-1).add_(1)
        h[0] = 2
        return h * 2


class WritesByHand(Writes):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            h: Tensor = self.a(x)
        h.view(-1).add_(1)
        h[0] = 2
        return h * 2


def test_views_and_in_place_operators_of_a_selected_module_keep_their_meaning() -> None:
    same_as(CPU.keep("float32", where="test_overrides.py"), make(Writes), make(WritesByHand))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x)
        return out


class NormedByHand(Normed):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x.to(BF16))
        return out


def test_running_statistics_are_written_to_the_buffers_and_not_to_a_cast_of_them() -> None:
    model, by_hand = make(Normed), make(NormedByHand)
    same_as(CPU.force("low", module="norm"), model, by_hand)
    assert int(model.get_buffer("norm.num_batches_tracked")) == 3
    with autocast(BF16):
        by_hand(X)
        by_hand(X)
    for name, buffer in model.named_buffers():
        assert equal(buffer, by_hand.get_buffer(name)), name


@torch.library.custom_op("fxamp_tests::double_of", mutates_args=())
def double_of(x: Tensor) -> Tensor:
    return x * 2


@double_of.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        doubled: Tensor = double_of(self.a(x).detach())
        return doubled


@pytest.mark.parametrize("op", [double_of, "fxamp_tests::double_of"], ids=["itself", "by name"])
def test_a_custom_operator_gets_a_rule_the_same_way(op: Any) -> None:
    amp = fxamp.convert(make(Custom), policy=CPU.keep("float32", op=op))
    assert amp(X).dtype is F32
    assert fxamp.convert(make(Custom), policy=CPU)(X).dtype is BF16


class Segments(nn.Module):
    """Reads a value, so the call has two segments."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        out: Tensor = self.b(h) if bool(h.sum() > -1e9) else h
        return out


class SegmentsByHand(Segments):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.autocast("cpu", enabled=False):
            out: Tensor = self.b(h.float())
        return out


def test_an_override_acts_in_the_segments_of_a_call_that_reads_values() -> None:
    same_as(CPU.keep("float32", module="b"), make(Segments), make(SegmentsByHand))


class Eager(Segments):
    """Takes a gradient inside, so its own Python runs eagerly, and its children in graphs."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.a(y).sum(), y, create_graph=True)
        h = torch.mm(slope, slope.t())
        out: Tensor = self.b(self.a(x))
        return out + h.sum()


class EagerChildByHand(Eager):
    def forward(self, x: Tensor) -> Tensor:
        y = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.a(y).sum(), y, create_graph=True)
        h = torch.mm(slope, slope.t())
        a = self.a(x)
        with torch.autocast("cpu", enabled=False):
            out: Tensor = self.b(a.float())
        return out + h.sum()


class EagerOperatorByHand(Eager):
    def forward(self, x: Tensor) -> Tensor:
        y = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.a(y).sum(), y, create_graph=True)
        with torch.autocast("cpu", enabled=False):
            h = torch.mm(slope.float(), slope.t().float())
        out: Tensor = self.b(self.a(x))
        return out + h.sum()


@pytest.mark.parametrize(
    ("policy", "by_hand"),
    [
        (CPU.keep("float32", module="b"), EagerChildByHand),
        (CPU.keep("float32", op=torch.mm), EagerOperatorByHand),
    ],
    ids=["a child of it", "its own operator"],
)
def test_an_override_acts_on_an_eager_piece(policy: Policy, by_hand: type[nn.Module]) -> None:
    amp = same_as(policy, make(Eager), make(by_hand))
    assert amp.eager_modules == ("",)


class Batched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.func.vmap(lambda w: torch.mm(x, w))(self.w)
        return out


class BatchedByHand(Batched):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x)


def test_an_override_acts_on_what_vmap_makes_of_a_call() -> None:
    same_as(CPU.keep("float32", where="test_overrides.py"), make(Batched), make(BatchedByHand))


class Sloped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.func.grad(lambda y: torch.mm(y, y.t()).sum())(x)
        return out


def test_where_an_override_cannot_act_it_is_refused_and_not_ignored() -> None:
    amp = fxamp.convert(make(Sloped), policy=CPU.keep("float32", op=torch.mm))
    with pytest.raises(fxamp.PolicyError, match=r"inside a gradient transform of torch\.func"):
        amp(X)


def test_a_method_other_than_forward_runs_under_the_overrides() -> None:
    class WithMethod(Two):
        def embed(self, x: Tensor) -> Tensor:
            return torch.mm(x, x.t())

    amp = fxamp.convert(make(WithMethod), policy=CPU.keep("float32", op=torch.mm, optional=True))
    assert amp.embed(X).dtype is F32
    assert fxamp.convert(make(WithMethod), policy=CPU).embed(X).dtype is BF16


# --- which override wins, and what is said of it --------------------------------------------------------


def test_the_last_override_that_means_a_call_wins_and_the_node_says_so() -> None:
    policy = CPU.keep("float32", op=torch.ops.aten.linear, why="first").force(
        "low", module="second", why="then"
    )
    amp = fxamp.convert(make(Two), policy=policy)
    amp(X)
    nodes = amp.graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    first, second = (node.meta["decision"] for node in nodes)
    assert (first.ruling.won, first.ruling.lost) == (policy.overrides[0], ())
    assert (second.ruling.won, second.ruling.lost) == (policy.overrides[1], (policy.overrides[0],))
    assert rule_of(amp, "aten::linear") == [
        "fp32: override keep float32 (op='aten::linear'): first",
        "lower_precision_fp: override force low (module='second'): then",
    ]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (CPU.keep("float32", module="seconds"), "no module is selected.*\n.*near to it:  second"),
        (CPU.keep("float32", module=nn.BatchNorm1d), "no module is selected.*\n.*near to it:"),
        (CPU.keep("float32", op="aten::layer_norm", module="first"), "no operator that the model calls"),
        (CPU.keep("float32", op="aten::bilinear"), "no operator.*\n.*near to it:  aten::linear"),
        (
            CPU.keep("float32", where="test_overrides.py:1"),
            "no operator.*\n.*near to it:  test_overrides.py:",
        ),
    ],
    ids=["path", "class", "both", "operator", "line"],
)
def test_an_override_that_means_nothing_is_an_error_each_time(policy: Policy, message: str) -> None:
    for _ in range(2):
        with pytest.raises(fxamp.PolicyError, match=message):
            fxamp.convert(make(Two), (X,), policy=policy)
    with pytest.raises(fxamp.PolicyError, match=message):
        fxamp.convert(make(Two), policy=policy)(X)


def test_an_optional_override_may_mean_nothing() -> None:
    policy = CPU.keep("float32", module="seconds", optional=True)
    assert fxamp.convert(make(Two), policy=policy)(X).dtype is BF16


def test_an_override_may_mean_only_what_a_later_mode_does() -> None:
    policy = CPU.keep("float32", op="aten::linear")
    amp = fxamp.convert(nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8)), policy=policy)
    assert amp.eval()(X).dtype is F32
    assert amp.train()(X).dtype is F32


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.a(x)
        return h + torch.ones(8, dtype=h.dtype) if h.dtype == F32 else h


def test_dtypes_that_python_reads_otherwise_are_reported() -> None:
    amp = fxamp.convert(make(Asks), policy=CPU.keep("float32", module="a"))
    assert amp(X).dtype is F32
    reads = amp.report().changed_reads
    assert [(read.dtype, read.without) for read in reads] == [(F32, BF16), (F32, None)]
    assert "test_overrides.py" in str(reads[0])
    assert str(reads[0]) in str(amp.report())


def test_without_a_change_no_read_is_reported() -> None:
    amp = fxamp.convert(make(Asks), policy=CPU.keep("float32", op="aten::add", optional=True))
    amp(X)
    assert amp.report().changed_reads == ()


# --- torch.compile --------------------------------------------------------------------------------------


def test_torch_compile_takes_overrides_of_operators() -> None:
    policy = CPU.keep("float32", op="aten::linear")
    compiled = torch.compile(make(Two), backend=fxamp_backend, options={"policy": cast("Any", policy)})
    assert compiled(X).dtype is F32


@pytest.mark.parametrize(
    "selection", [{"module": "second"}, {"where": "m.py:3"}, {"op": functional.layer_norm}], ids=named
)
def test_torch_compile_refuses_overrides_by_place(selection: dict[str, Any]) -> None:
    policy = CPU.keep("float32", **selection)
    model = torch.compile(make(Two), backend=fxamp_backend, options={"policy": cast("Any", policy)})
    with pytest.raises(Exception, match=r"can select operators alone"):
        model(X)
