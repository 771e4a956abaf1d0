"""The fits check finds the constants that low precision does not have, and nothing else."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional

import fxamp
from fxamp.export.fits import Kind, Unfit, tell, unfit
from tests.models import SmallCNN

F16, BF16 = torch.float16, torch.bfloat16
LOW = (F16, BF16)
X, ON = torch.randn(3, 8), torch.tensor([[True, False] * 4] * 3)


class Model(nn.Module):
    """A linear layer, then what a test does with its low precision result."""

    def __init__(self, **buffers: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)


class Mask(Model):
    """A mask of -1e9."""

    def forward(self, x: Tensor, on: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y.masked_fill(on, -1e9).softmax(-1)


class Eps(Model):
    """Adds 1e-12."""

    def forward(self, x: Tensor, on: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y / (y.abs().sum(-1, keepdim=True) + 1e-12)


def _graph(model: nn.Module, policy: fxamp.Policy, args: Any) -> GraphModule:
    amp = fxamp.convert(model.eval(), policy=policy)
    with torch.no_grad():
        amp.capture(*args)
    return amp.graph_module


def _unfit(model: nn.Module, dtype: torch.dtype, *args: Any) -> tuple[Unfit, ...]:
    """The findings, whose suggestions are pasted one by one: each must be without effect on the others."""
    args = args or (X, ON)
    policy = fxamp.Policy.native("cpu", dtype)
    findings = unfit(_graph(model, policy, args))
    for finding in findings:
        pasted = eval(finding.suggestion, {"policy": policy})
        left = unfit(_graph(model, pasted, args))
        assert [(one.name, one.where) for one in left] == [
            (one.name, one.where) for one in findings if one is not finding
        ]
    return findings


def _one(model: nn.Module, dtype: torch.dtype, *args: Any) -> Unfit:
    (finding,) = _unfit(model, dtype, *args)
    return finding


def _frozen_says_the_same(model: nn.Module, dtype: torch.dtype) -> None:
    amp = fxamp.convert(model.eval(), dtype=dtype)
    frozen = fxamp.freeze(amp, (X, ON))
    with torch.no_grad():
        amp.capture(X, ON)
    named = dict(model.named_parameters())
    assert unfit(frozen.graph_module, named) == unfit(amp.graph_module)


# --- numbers ------------------------------------------------------------------------------------------


def test_a_mask_of_minus_1e9_overflows_in_float16_and_fits_bfloat16() -> None:
    finding = _one(Mask(), F16)
    assert (finding.name, finding.value, finding.dtype) == ("value of aten::masked_fill", -1e9, F16)
    assert finding.kind is Kind.OVERFLOWS
    assert finding.where.function == "forward"
    assert finding.suggestion == "policy.keep(\"float32\", op='aten::linear', module='layer')"
    assert _unfit(Mask(), BF16) == ()
    _frozen_says_the_same(Mask(), F16)


def test_an_eps_of_1e_12_rounds_away_in_float16_and_not_in_bfloat16() -> None:
    finding = _one(Eps(), F16)
    assert (finding.name, finding.value, finding.kind) == ("other of aten::add", 1e-12, Kind.ROUNDS_AWAY)
    assert _unfit(Eps(), BF16) == ()


def _of(forward: Any, **buffers: Tensor) -> nn.Module:
    """A model whose ``forward`` is *forward* of itself, the linear layer's result and the mask."""

    class Other(Model):
        def forward(self, x: Tensor, on: Tensor) -> Any:
            return forward(self, self.layer(x), on)

    return Other(**buffers)


FLOAT32_MIN = torch.finfo(torch.float32).min
NUMBERS: dict[str, tuple[Any, str, float, Kind, tuple[torch.dtype, ...]]] = {
    "where": (
        lambda m, y, on: torch.where(on, y, -1e9).softmax(-1),
        "other of aten::where", -1e9, Kind.OVERFLOWS, (F16,),
    ),
    "where, the other way round": (
        lambda m, y, on: torch.where(on, -1e9, y),
        "self of aten::where", -1e9, Kind.OVERFLOWS, (F16,),
    ),
    "filled in place": (
        lambda m, y, on: y.masked_fill_(on, -1e9).softmax(-1),
        "value of aten::masked_fill_", -1e9, Kind.OVERFLOWS, (F16,),
    ),
    "a fill after a view": (
        lambda m, y, on: (y * 0.5).view(-1).masked_fill(on.view(-1), -70000),
        "value of aten::masked_fill", -70000, Kind.OVERFLOWS, (F16,),
    ),
    "a fill that a layer reads": (
        lambda m, y, on: m.layer(y.relu().masked_fill(on, -1e9)),
        "value of aten::masked_fill", -1e9, Kind.OVERFLOWS, (F16,),
    ),
    "full in the dtype of scores": (
        lambda m, y, on: torch.where(on, y, torch.full([], -1e9, dtype=y.dtype)),
        "fill_value of aten::full", -1e9, Kind.OVERFLOWS, (F16,),
    ),
    "full_like": (
        lambda m, y, on: y + torch.full_like(y, -1e9),
        "fill_value of aten::full_like", -1e9, Kind.OVERFLOWS, (F16,),
    ),
    "pad": (
        lambda m, y, on: functional.pad(y, (0, 1), value=-1e9),
        "value of aten::pad", -1e9, Kind.OVERFLOWS, (F16,),
    ),
    "multiplied by 1e9": (lambda m, y, on: y * 1e9, "other of aten::mul", 1e9, Kind.OVERFLOWS, (F16,)),
    "multiplied, then a layer": (
        lambda m, y, on: m.layer(y * 1e9), "other of aten::mul", 1e9, Kind.OVERFLOWS, (F16,),
    ),
    "multiplied by 1e-9": (lambda m, y, on: y * 1e-9, "other of aten::mul", 1e-9, Kind.FLUSHED, (F16,)),
    "multiplied by 1e-42": (lambda m, y, on: y * 1e-42, "other of aten::mul", 1e-42, Kind.FLUSHED, LOW),
    "divided by 1e9": (lambda m, y, on: y / 1e9, "other of aten::div", 1e9, Kind.OVERFLOWS, (F16,)),
    "subtracted from 1e6": (lambda m, y, on: 1e6 - y, "other of aten::rsub", 1e6, Kind.OVERFLOWS, (F16,)),
    "clamp": (lambda m, y, on: y.clamp(min=1e-12), "min of aten::clamp", 1e-12, Kind.FLUSHED, (F16,)),
    "normalize": (
        lambda m, y, on: functional.normalize(y), "min of aten::clamp_min", 1e-12, Kind.FLUSHED, (F16,),
    ),
    "a bound next to 1 (1e-4)": (
        lambda m, y, on: y.sigmoid().clamp(max=0.9999),
        "max of aten::clamp", 0.9999, Kind.ROUNDS_AWAY, LOW,
    ),
    "a bound next to 1 (1e-3)": (
        lambda m, y, on: y.sigmoid().clamp(max=0.999), "max of aten::clamp", 0.999, Kind.ROUNDS_AWAY, (BF16,),
    ),
    "the least float32": (
        lambda m, y, on: y.masked_fill(on, FLOAT32_MIN),
        "value of aten::masked_fill", FLOAT32_MIN, Kind.OVERFLOWS, LOW,
    ),
    "a float32 mask that attention casts": (
        lambda m, y, on: functional.scaled_dot_product_attention(
            y, y, y, torch.zeros(3, 3).masked_fill(on[:, :3], FLOAT32_MIN)
        ),
        "value of aten::masked_fill", FLOAT32_MIN, Kind.OVERFLOWS, LOW,
    ),
    "a float32 mask of products that attention casts": (
        lambda m, y, on: functional.scaled_dot_product_attention(
            y, y, y, (1.0 - on[:, :3].float()) * -1e9
        ),
        "other of aten::mul", -1e9, Kind.OVERFLOWS, (F16,),
    ),
    "a float32 mask that is written to a view": (
        lambda m, y, on: functional.scaled_dot_product_attention(y, y, y, _causal()),
        "value of aten::fill_", -1e9, Kind.OVERFLOWS, (F16,),
    ),
    "a float32 mask that is added in place": (
        lambda m, y, on: y.add_(torch.zeros(8).masked_fill(on[0], -1e9)).softmax(-1),
        "value of aten::masked_fill", -1e9, Kind.OVERFLOWS, (F16,),
    ),
    "a float32 number that is converted": (
        lambda m, y, on: torch.where(on, y, torch.full([], -1e9).to(y.dtype)),
        "fill_value of aten::full", -1e9, Kind.OVERFLOWS, (F16,),
    ),
}  # fmt: skip


def _causal() -> Tensor:
    mask = torch.zeros(3, 3)
    mask[:, 1:].fill_(-1e9)
    return mask


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("case", NUMBERS)
def test_a_number_that_low_precision_lacks_is_found_where_it_meets_it(case: str, dtype: torch.dtype) -> None:
    forward, name, value, kind, dtypes = NUMBERS[case]
    findings = _unfit(_of(forward), dtype)
    found = [(finding.name, finding.value, finding.dtype, finding.kind) for finding in findings]
    expected = [(name, value, dtype, kind)] if dtype in dtypes else []
    assert found == expected


FITS: dict[str, Any] = {
    "-inf": lambda m, y, on: y.masked_fill(on, -math.inf),
    "the least of the dtype": lambda m, y, on: y.masked_fill(on, torch.finfo(y.dtype).min),
    "-10000": lambda m, y, on: torch.where(on, y, -10000.0) + 1e-5,
    "inf as a bound": lambda m, y, on: y.clamp(min=0, max=math.inf),
    "a tiny float32 number that is added": lambda m, y, on: m.layer(y.float() + torch.full((8,), 1e-12)),
    "a tiny float32 buffer that is added": lambda m, y, on: m.layer(y.float() + m.tiny),
    "a comparison": lambda m, y, on: (y > 1e9) | (y < 1e-12),
    "a mask of float32 scores": lambda m, y, on: y.float().masked_fill(on, -1e9).softmax(-1),
    "an eps of float32": lambda m, y, on: y.float() / (y.float().norm() + 1e-12),
    "a huge mask after a float32 softmax": lambda m, y, on: m.layer(
        y.float().masked_fill(on, -1e9).softmax(-1)
    ),
    "the eps of a norm": lambda m, y, on: functional.layer_norm(y, (8,), eps=1e-12),
    "the scale of attention": lambda m, y, on: functional.scaled_dot_product_attention(y, y, y, scale=1e-9),
    "a seed of float32": lambda m, y, on: torch.full((8,), 1e9) / 1e9 + y,
    "integers": lambda m, y, on: y[torch.full((2,), 1000000) // 1000000],
    "sizes": lambda m, y, on: y.repeat(1, 70000)[:, :8],
}


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("case", FITS)
def test_nothing_is_found_where_a_number_fits_or_meets_float32_only(case: str, dtype: torch.dtype) -> None:
    assert _unfit(_of(FITS[case], tiny=torch.full((8,), 1e-12)), dtype) == ()


# --- tensors ------------------------------------------------------------------------------------------


def test_weights_of_1e6_overflow_in_float16() -> None:
    model = Mask()
    model.layer.weight.data[2, 3:5] = torch.tensor([1e6, -2e6])
    weight, _ = unfit(_graph(model, fxamp.Policy.native("cpu", F16), (X, ON)))
    assert (weight.name, weight.value, weight.kind) == ("layer.weight", -2e6, Kind.OVERFLOWS)
    assert (weight.count, weight.total) == (2, 64)
    assert weight.where.module == "layer"
    assert weight.suggestion == "policy.keep(\"float32\", op='aten::linear', module='layer')"
    assert _unfit(model, BF16) == ()
    _frozen_says_the_same(model, F16)


@pytest.mark.parametrize(("dtype", "tiny"), [(F16, 1e-9), (BF16, 1e-41)], ids=str)
def test_tiny_weights_are_flushed(dtype: torch.dtype, tiny: float) -> None:
    model = Model()
    model.layer.weight.data.fill_(-tiny)
    model.forward = lambda x, on: model.layer(x)
    finding = _one(model, dtype)
    assert (finding.name, finding.kind, finding.dtype) == ("layer.weight", Kind.FLUSHED, dtype)
    assert finding.value == pytest.approx(-tiny, rel=1e-3)
    assert (finding.count, finding.total) == (64, 64)


def test_a_buffer_is_found_by_its_name_where_it_is_cast() -> None:
    model = _of(lambda m, y, on: y @ m.mask, mask=torch.tensor([0.0, -1e9] * 4))
    finding = _one(model, F16)
    assert (finding.name, finding.value, finding.count, finding.total) == ("mask", -1e9, 4, 8)
    assert _unfit(model, BF16) == ()


def test_a_buffer_that_meets_float32_only_fits() -> None:
    assert _unfit(_of(lambda m, y, on: y.float() + m.mask, mask=torch.full((8,), -1e9)), F16) == ()


def test_a_buffer_of_one_number_is_lost_without_a_cast() -> None:
    model = _of(lambda m, y, on: y * m.scale, scale=torch.tensor(1e9))
    finding = _one(model, F16)
    assert (finding.name, finding.value, finding.kind) == ("scale", 1e9, Kind.OVERFLOWS)


def test_a_buffer_of_one_number_that_is_added_rounds_away() -> None:
    finding = _one(_of(lambda m, y, on: y + m.eps, eps=torch.tensor(1e-12)), F16)
    assert (finding.name, finding.kind) == ("eps", Kind.ROUNDS_AWAY)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_a_tensor_that_forward_makes_of_numbers_is_found(dtype: torch.dtype) -> None:
    model = _of(lambda m, y, on: y @ torch.tensor([3.4e38 if dtype is BF16 else 1e5] * 8))
    finding = _one(model, dtype)
    assert finding.kind is Kind.OVERFLOWS
    assert (finding.count, finding.total, finding.dtype) == (8, 8, dtype)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_random_weights_fit(dtype: torch.dtype) -> None:
    assert _unfit(SmallCNN(), dtype, torch.randn(2, 3, 8, 8)) == ()


def test_of_a_frozen_graph_alone_infinite_weights_are_known() -> None:
    model = Mask()
    model.layer.weight.data[2, 3:5] = torch.tensor([1e6, -2e6])
    model.layer.bias.data[:] = 1e-9
    frozen = fxamp.freeze(fxamp.convert(model.eval(), dtype=F16), (X, ON))
    weight, mask = unfit(frozen.graph_module)
    assert (weight.name, weight.count, weight.value) == ("layer.weight", 2, math.inf)
    assert mask.name == "value of aten::masked_fill"


# --- text ---------------------------------------------------------------------------------------------


def test_a_finding_says_what_where_and_a_way_out() -> None:
    model = Mask()
    model.layer.weight.data[2, 3] = 1e6
    text = tell(unfit(_graph(model, fxamp.Policy.native("cpu", F16), (X, ON))))
    here = Mask.forward.__code__.co_firstlineno + 1
    assert text == (
        "2 constants do not fit the low precision:\n"
        "layer.weight (of 64 elements 1, up to 1e+06) overflows to inf in f16, which ends at 65504, at "
        f"module 'layer', test_fits.py:{here} in forward: y: Tensor = self.layer(x)\n"
        "  policy.keep(\"float32\", op='aten::linear', module='layer')\n"
        "value of aten::masked_fill = -1e+09 overflows to inf in f16, which ends at 65504, at "
        f"test_fits.py:{here + 1} in forward: return y.masked_fill(on, -1e9).softmax(-1)\n"
        "  policy.keep(\"float32\", op='aten::linear', module='layer')"
    )


def test_a_finding_is_one_line() -> None:
    line = Mask.forward.__code__.co_firstlineno + 2
    assert str(_one(Mask(), F16)) == (
        "value of aten::masked_fill = -1e+09 overflows to inf in f16, which ends at 65504; "
        "policy.keep(\"float32\", op='aten::linear', module='layer') "
        f"(test_fits.py:{line} in forward: return y.masked_fill(on, -1e9).softmax(-1))"
    )


def test_where_the_model_asks_for_low_precision_itself_no_override_is_told() -> None:
    model = _of(lambda m, y, on: torch.full((8,), -1e9).half())
    (finding,) = unfit(_graph(model, fxamp.Policy.native("cpu", F16), (X, ON)))
    assert finding.suggestion == ""
    assert "no override helps, the model itself asks for f16" in str(finding)


def test_the_worst_is_told_first() -> None:
    findings = unfit(
        _graph(
            _of(lambda m, y, on: (y + 1e-12).clamp(min=1e-12) * 1e9),
            fxamp.Policy.native("cpu", F16),
            (X, ON),
        )
    )
    first, *rest = tell(findings[::-1]).splitlines()
    assert first == "3 constants do not fit the low precision:"
    assert [line.split(" = ")[0] for line in rest[::2]] == [
        "other of aten::mul",
        "min of aten::clamp",
        "other of aten::add",
    ]


def test_without_findings_nothing_is_told() -> None:
    assert tell(()) == ""
