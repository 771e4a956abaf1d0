"""Converting for a device that is not here: its casts, on the tensors and kernels that there are.

The oracle is ``tests/conformance/cuda_policy_on_cpu.py``: the dispatcher on the CPU, with CUDA's table.
"""
# ruff: noqa: D102  the models are what they say

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp
from fxamp import Policy
from fxamp.ir.text import show
from fxamp.policy.dispatcher import AUTOCAST_KEYS
from tests.awkward import MODELS
from tests.awkward_calls import assert_same, eager_calls, two_calls
from tests.conformance.cuda_policy_on_cpu import installed
from tests.models import SmallCNN, SmallTransformer, autocast, equal, run

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Net(nn.Module):
    """``softmax`` is float32 on CUDA and has no rule on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.a(x), -1)


def seeded(cls: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return cls()


def test_a_model_on_the_cpu_gets_the_casts_of_cuda() -> None:
    amp = fxamp.convert(seeded(Net), device_type="cuda", dtype=F16, dynamic_shapes=False)
    assert amp(X).dtype is F32
    assert show(amp.graph_module).splitlines()[-2] == "%softmax: f32[4, 8] = softmax(%linear, -1, dtype=f32)"
    assert amp.scaler.is_enabled()


@pytest.mark.parametrize("device", sorted(AUTOCAST_KEYS))
def test_every_device_types_casts_are_those_of_its_table(device: str) -> None:
    amp = fxamp.convert(seeded(Net), device_type=device, dtype=F16)
    wide = Policy.native(device, F16).rule("aten::softmax.int") is not None
    assert amp(X).dtype is (F32 if wide else F16)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [BF16, pytest.param(F16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", list(MODELS))
def test_an_awkward_model_is_cuda_autocast_too(name: str, dtype: torch.dtype) -> None:
    expected = eager_calls(name, dtype, installed)
    found, _ = two_calls(name, dtype, "cuda")
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("cls", [SmallCNN, SmallTransformer])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_training_is_cuda_autocasts(cls: type[nn.Module], dtype: torch.dtype) -> None:
    args = (torch.randn(2, 3, 8, 8),) if cls is SmallCNN else (torch.randint(0, 30, (2, 5)),)
    eager, model = seeded(cls), seeded(cls)
    with installed():
        wanted = run(eager, eager, args, {}, autocast(dtype))
    found = run(model, fxamp.convert(model, device_type="cuda", dtype=dtype), args, {}, nullcontext())
    for what in ("gradients", "buffers"):
        assert [key for key in wanted[what] if not equal(wanted[what][key], found[what][key])] == []
    assert all(equal(a, b) for a, b in zip(wanted["outputs"], found["outputs"], strict=True))


class OwnRegions(nn.Module):
    """Regions of the device that the model is meant for, as model code has them."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.a = device, nn.Linear(8, 8)
        self.asked: Any = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.autocast(device_type=self.device, enabled=False):
            out: Tensor = self.a(h.float())
        assert torch.is_autocast_enabled()
        assert torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") is F16
        return out


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_regions_of_the_model_act_on_what_stands_in_for_the_device(device: str) -> None:
    amp = fxamp.convert(OwnRegions(device), device_type="cuda", dtype=F16)
    assert amp(X).dtype is F32
    assert amp.eager_modules == ()
    assert [row.inputs[0] for row in amp.report().operators if row.op == "aten::linear"] == ["f16", "f32"]


def test_a_conversion_leaves_torch_as_it_was() -> None:
    before = (torch.autocast.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype)
    fxamp.convert(OwnRegions("cuda"), device_type="cuda", dtype=F16)(X)
    assert (torch.autocast.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype) == before
    assert not torch.is_autocast_enabled("cuda")
    assert not torch.is_autocast_enabled("cpu")


def test_a_rule_that_a_custom_operator_has_on_cuda_is_honoured() -> None:
    @torch.library.custom_op("fxamp_tests::wide_on_cuda", mutates_args=())
    def wide(x: Tensor) -> Tensor:
        return x + 1

    wide.register_fake(torch.empty_like)
    wide.register_autocast("cuda", F32)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = wide(self.a(x).detach())
            return out

    assert fxamp.convert(Model(), device_type="cuda", dtype=F16)(X).dtype is F32
    assert fxamp.convert(Model(), device_type="cpu", dtype=F16)(X).dtype is F16


def test_a_policy_says_itself_on_which_tensors_it_acts() -> None:
    policy = Policy.native("cuda", F16).on("cpu")
    assert fxamp.convert(seeded(Net), policy=policy)(X).dtype is F32
    assert fxamp.convert(seeded(Net), policy=Policy.native("cuda", F16))(X).dtype is F32


def test_what_contradicts_the_policy_is_refused() -> None:
    policy = Policy.native("cuda", F16)
    with pytest.raises(fxamp.ArgumentError, match="the policy is one for 'cuda'"):
        fxamp.convert(nn.Linear(1, 1), device_type="mps", policy=policy)
    with pytest.raises(fxamp.ArgumentError, match="dtype is torch"):
        fxamp.convert(nn.Linear(1, 1), dtype=BF16, policy=policy)


@pytest.mark.parametrize("overridden", [False, True])
def test_a_frozen_module_keeps_the_casts_of_the_device(overridden: bool) -> None:
    policy = Policy.native("cuda", F16)
    policy = policy.keep("float32", module="head") if overridden else policy
    tokens = torch.randint(0, 30, (2, 5))
    amp = fxamp.convert(seeded(SmallTransformer).eval(), policy=policy)
    with torch.no_grad():
        wanted = amp(tokens)
        found = fxamp.freeze(amp, (tokens,))(tokens)
    assert found["logits"].dtype is (F32 if overridden else F16)
    assert all(equal(found[name], wanted[name]) for name in wanted)


# --- the meta device ------------------------------------------------------------------------------------


def test_a_model_without_values_is_converted_to_the_same_graph() -> None:
    x = torch.randint(0, 30, (2, 5))
    real = fxamp.convert(SmallTransformer().eval(), (x,), device_type="cuda", dtype=F16)
    with torch.device("meta"):
        model = SmallTransformer().eval()
        meta = fxamp.convert(model, (x.to("meta"),), device_type="cuda", dtype=F16)
    assert show(meta.graph_module) == show(real.graph_module)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_model_that_got_its_values_is_captured_again() -> None:
    with torch.device("meta"):
        model = Net()
    amp = fxamp.convert(model, (X.to("meta"),), device_type="cuda", dtype=F16)
    amp.to_empty(device="cpu")
    amp.load_state_dict(seeded(Net).state_dict())
    assert equal(amp(X), fxamp.convert(seeded(Net), device_type="cuda", dtype=F16)(X))


def test_a_value_that_is_not_there_is_said_to_be_missing() -> None:
    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if bool(x.sum() > 0) else x

    with pytest.raises(fxamp.CaptureError, match="has no values"):
        fxamp.convert(Reads(), (X.to("meta"),), device_type="cuda", dtype=F16)
