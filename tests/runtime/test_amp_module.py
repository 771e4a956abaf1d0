"""The converted model is the user's model: same parameters, same names, same behaviour as a module."""

from __future__ import annotations

import copy
import pickle
import random
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import fxamp
from fxamp.ir.text import show
from tests.models import SmallCNN, SmallTransformer, assert_like_eager, autocast, equal, run

DTYPES = [torch.bfloat16, torch.float16]
IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(0, 30, (2, 7), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("training", [True, False])
def test_a_cnn_is_eager_autocast(dtype: torch.dtype, training: bool) -> None:
    assert_like_eager(SmallCNN().train(training), (IMAGES.clone().requires_grad_(),), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("training", [True, False])
def test_a_transformer_with_a_tied_head_is_eager_autocast(dtype: torch.dtype, training: bool) -> None:
    assert_like_eager(SmallTransformer().train(training), (TOKENS,), {"scale": 0.5}, dtype=dtype)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("training", [True, False])
def test_without_gradients_it_is_eager_autocast(mode: Any, training: bool) -> None:
    with mode():
        assert_like_eager(SmallTransformer().train(training), (TOKENS,))
        assert_like_eager(SmallCNN().train(training), (IMAGES,))


def test_one_program_serves_other_batch_sizes_and_lengths() -> None:
    model = SmallTransformer()
    amp = assert_like_eager(model, (TOKENS,))
    for batch, length in ((3, 7), (2, 11), (5, 4)):
        amp(torch.randint(0, 30, (batch, length)))
    assert len(amp.graph_modules) == 1


def test_a_batch_of_one_or_none_is_captured_apart_and_right() -> None:
    model = SmallCNN().eval()
    amp = fxamp.convert(model, dtype=torch.bfloat16)
    for batch in (4, 1, 0, 2):
        images = torch.randn(batch, 3, 8, 8)
        with torch.no_grad(), autocast(torch.bfloat16):
            expected = model(images)
        with torch.no_grad():
            assert equal(amp(images), expected)


def test_a_size_that_python_decided_on_is_guarded() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h: Tensor = self.f(x)
            return h if x.shape[0] > 3 else h + 1

    model = Branch()
    amp = fxamp.convert(model, dtype=torch.bfloat16)
    for batch in (2, 5, 3, 9):
        x = torch.randn(batch, 4)
        with autocast(torch.bfloat16):
            expected = model(x)
        assert equal(amp(x), expected)
    assert len(amp.graph_modules) == 2


def test_training_and_evaluation_are_captured_apart_and_both_stay() -> None:
    amp = fxamp.convert(SmallCNN(), dtype=torch.bfloat16)
    for training in (True, False, True, False):
        amp.train(training)
        amp(IMAGES)
    assert len(amp.graph_modules) == 2
    assert "dropout" not in show(amp.graph_module)  # it is off: it gives its argument back
    amp.train()(IMAGES)
    assert "dropout(%mean, 0.3, True)" in show(amp.graph_module)


def test_parameters_are_the_sources_and_names_are_unchanged() -> None:
    model = SmallTransformer()
    amp = fxamp.convert(model, dtype=torch.bfloat16)
    assert list(amp.state_dict()) == list(model.state_dict())
    assert [name for name, _ in amp.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert all(a is b for a, b in zip(amp.parameters(), model.parameters(), strict=True))
    assert amp.embed is model.embed
    assert amp.training is model.training


def test_an_update_of_the_weights_in_place_or_by_loading_is_seen() -> None:
    model = SmallCNN().eval()
    amp = fxamp.convert(model, dtype=torch.bfloat16)
    with torch.no_grad():
        amp(IMAGES)
        model.head.weight.add_(1.0)
        assert equal(amp(IMAGES), _eager(model, IMAGES))
        amp.load_state_dict(SmallCNN().state_dict(), assign=True)
        assert equal(amp(IMAGES), _eager(model, IMAGES))
    assert len(amp.graph_modules) == 1


def test_moving_to_another_dtype_or_freezing_is_noticed() -> None:
    model = SmallCNN().eval()
    amp = fxamp.convert(model, dtype=torch.bfloat16)
    amp(IMAGES)
    model.head.requires_grad_(False)
    assert equal(amp(IMAGES), _eager(model, IMAGES))
    amp.double()
    assert equal(amp(IMAGES.double()), _eager(model, IMAGES.double()))


def test_a_replaced_child_is_noticed() -> None:
    model = SmallCNN().eval()
    amp = fxamp.convert(model, dtype=torch.bfloat16)
    amp(IMAGES)
    model.head = nn.Linear(8, 3)
    assert equal(amp(IMAGES), _eager(model, IMAGES))


def test_copies_and_pickles_run_on_their_own() -> None:
    amp = fxamp.convert(SmallCNN().eval(), dtype=torch.bfloat16)
    expected = amp(IMAGES)
    for twin in (copy.deepcopy(amp), pickle.loads(pickle.dumps(amp))):
        assert equal(twin(IMAGES), expected)
        with torch.no_grad():
            twin.head.weight.zero_()
        assert equal(amp(IMAGES), expected)


def test_an_ambient_region_changes_nothing_and_is_left_as_it_was() -> None:
    amp = fxamp.convert(SmallCNN().eval(), dtype=torch.bfloat16)
    expected = amp(IMAGES)
    with torch.autocast("cpu", dtype=torch.float16):
        assert equal(amp(IMAGES), expected)
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is torch.float16
    fresh = fxamp.convert(SmallCNN().eval(), dtype=torch.bfloat16)
    fresh.load_state_dict(amp.state_dict())
    with torch.autocast("cpu", dtype=torch.float16):
        assert equal(fresh(IMAGES), expected)


def test_a_kernel_that_consults_autocast_does_so_inside_an_ambient_region_too() -> None:
    model = nn.Bilinear(4, 4, 3)
    amp = fxamp.convert(model, dtype=torch.bfloat16)
    x = torch.randn(2, 4)
    with autocast(torch.bfloat16):
        expected = model(x, x)
    assert equal(amp(x, x), expected)
    with torch.autocast("cpu", dtype=torch.float16):
        assert equal(amp(x, x), expected)
    with torch.autocast("cpu", enabled=False):
        assert equal(amp(x, x), expected)


def test_conversion_and_a_capture_leave_the_source_as_it_was() -> None:
    model = SmallCNN()
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    before = {id(m): dict(m.__dict__) for m in model.modules()}
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    randoms = torch.get_rng_state(), random.getstate(), _numpy_state()
    amp = fxamp.convert(model, (IMAGES,), dtype=torch.bfloat16)
    hookless = fxamp.convert(copy.deepcopy(model).train(), dtype=torch.bfloat16)
    hookless._forward_hooks.clear()
    assert calls == []
    assert {id(m): dict(m.__dict__) for m in model.modules()} == before
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), randoms[0])
    assert random.getstate() == randoms[1]
    assert _numpy_state() == randoms[2]
    assert model.training
    del amp


def test_capture_alone_touches_no_weight_buffer_attribute_or_random_state() -> None:
    model = SmallTransformer()
    dicts = {name: set(module.__dict__) for name, module in model.named_modules()}
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    identities = [id(tensor) for tensor in (*model.parameters(), *model.buffers())]
    random_state = torch.get_rng_state()
    fxamp.convert(model, (TOKENS,), dtype=torch.bfloat16)
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == dicts
    assert [id(tensor) for tensor in (*model.parameters(), *model.buffers())] == identities
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    values = [value for module in model.modules() for value in module.__dict__.values()]
    assert not any(isinstance(value, FakeTensor) for value in values)


def test_a_plain_function_is_converted() -> None:
    weight = torch.randn(4, 4, requires_grad=True)

    def loss(x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(x @ weight, target)

    x, target = torch.randn(3, 4), torch.tensor([0, 1, 2])
    amp = fxamp.convert(loss, device_type="cpu", dtype=torch.bfloat16)
    with autocast(torch.bfloat16):
        expected = loss(x, target)
    assert equal(amp(x, target), expected)
    (ours,) = torch.autograd.grad(amp(x, target), weight)
    (theirs,) = torch.autograd.grad(expected, weight)
    assert equal(ours, theirs)


@dataclass
class Output:
    """What a model may return."""

    logits: Tensor
    hidden: list[Tensor]
    size: int
    note: str | None = None


def test_containers_dataclasses_keywords_and_defaults_come_through() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(4, 4)

        def forward(
            self, batch: dict[str, Any], *, double: bool = False, bias: Tensor | None = None
        ) -> Output:
            x, (mask,) = batch["x"], batch["masks"]
            h = self.f(x) * mask
            if double:
                h = h * 2
            if bias is not None:
                h = h + bias
            return Output(h, [x, h.relu()], x.shape[0] * 2)

    model = Model()
    amp = fxamp.convert(model, dtype=torch.bfloat16)
    for batch, double, bias in ((2, False, None), (3, True, None), (3, False, torch.randn(4))):
        data = {"x": torch.randn(batch, 4), "masks": [torch.ones(4)]}
        with autocast(torch.bfloat16):
            expected = model(data, double=double, bias=bias)
        found = amp(data, double=double, bias=bias)
        assert isinstance(found, Output)
        assert equal(found.logits, expected.logits)
        assert found.hidden[0] is data["x"]
        assert equal(found.hidden[1], expected.hidden[1])
        assert (found.size, found.note) == (expected.size, None)
    assert len(amp.graph_modules) == 3


def test_a_buffer_that_forward_rebinds_is_written_back() -> None:
    class Running(nn.Module):
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(3, 3)
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            h: Tensor = self.f(x)
            self.mean = 0.9 * self.mean + 0.1 * h.detach().float().mean(0)
            return h - self.mean

    model = Running()
    twin = copy.deepcopy(model)
    amp = fxamp.convert(model, dtype=torch.bfloat16)
    for _ in range(3):
        x = torch.randn(5, 3)
        with autocast(torch.bfloat16):
            expected = twin(x)
        assert equal(amp(x), expected)
        assert equal(model.mean, twin.mean)
    assert amp.eager_modules == ()
    assert len(amp.graph_modules) == 1


def test_a_hook_runs_and_makes_its_module_eager_whenever_it_comes() -> None:
    model = SmallCNN().eval()
    amp = fxamp.convert(model, dtype=torch.bfloat16)
    amp(IMAGES)
    assert amp.eager_modules == ()
    seen: list[torch.dtype] = []
    handle = model.body.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    assert equal(amp(IMAGES), _eager(model, IMAGES))
    assert seen == [torch.bfloat16, torch.bfloat16]
    assert "body" in amp.eager_modules
    assert any("hooks" in piece.reason for piece in amp.report().eager)
    handle.remove()


def test_a_part_that_cannot_be_captured_stays_eager_and_its_neighbours_do_not() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            drawn = random.random()  # which keeps it eager
            result: Tensor = self.a(x) if drawn >= 0 else self.b(x)
            return result

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pre, self.gate, self.post = (
                nn.Linear(4, 4),
                Gate(),
                nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
            )

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.post(self.gate(self.pre(x)) + self.pre(x))
            return result

    amp = assert_like_eager(Model(), (torch.randn(3, 4),), eager_modules=("", "gate"))
    text = str(amp.report())
    assert "eager: gate:" in text
    assert len(amp.graph_modules) >= 3


def test_a_banned_or_refused_operator_raises_at_convert_with_the_line() -> None:
    def mixed(x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, y])

    args = (torch.ones(2, dtype=torch.float16), torch.ones(2, dtype=torch.float16))
    with pytest.raises(fxamp.PolicyError, match=r"prioritize(.|\n)*torch.cat\(\[x, y\]\)"):
        fxamp.convert(mixed, args, device_type="cpu", dtype=torch.bfloat16)


def test_what_eager_refuses_the_converted_model_refuses() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out = torch.zeros(2, 4)
            return out.index_add(0, torch.tensor([0, 1]), self.f(x))

    model, x = Mixed(), torch.randn(2, 4)
    with autocast(torch.bfloat16), pytest.raises(RuntimeError) as expected:
        model(x)
    with pytest.raises(RuntimeError) as found:
        fxamp.convert(model, dtype=torch.bfloat16)(x)
    assert str(found.value).splitlines()[0] == str(expected.value).splitlines()[0]


def test_the_report_names_operator_line_rule_and_dtypes() -> None:
    amp = fxamp.convert(SmallCNN(), (IMAGES,), dtype=torch.bfloat16)
    rows = {row.node: row for row in amp.report().operators}
    assert rows["linear"].inputs == ("bf16", "bf16", "bf16")
    assert rows["linear"].rule.startswith("lower_precision_fp")
    assert rows["linear"].where.module == "head"
    assert "self.head" in rows["linear"].where.source
    assert amp.report().casts == (7,)
    assert amp.report().totals["lower_precision_fp"] == 3


def test_the_scaler_is_on_for_float16_and_off_for_bfloat16() -> None:
    assert fxamp.convert(SmallCNN(), dtype=torch.float16).scaler.is_enabled()
    amp = fxamp.convert(SmallCNN(), dtype=torch.bfloat16)
    assert not amp.scaler.is_enabled()
    assert amp.scaler is amp.scaler


def test_what_is_not_a_model_is_refused() -> None:
    with pytest.raises(TypeError, match="not str"):
        fxamp.convert("model")  # type: ignore[arg-type]
    with pytest.raises(fxamp.PolicyError):
        fxamp.convert(SmallCNN(), dtype=torch.float64)


def _eager(model: nn.Module, x: Tensor) -> Tensor:
    with autocast(torch.bfloat16):
        out: Tensor = model(x)
    return out


def test_the_comparison_sees_a_difference() -> None:
    model = SmallCNN()
    one = run(model, model, (IMAGES,), {}, autocast(torch.bfloat16))
    other = run(model, model, (IMAGES,), {}, nullcontext())
    assert not equal(one["outputs"][0], other["outputs"][0])


def _numpy_state() -> str:
    return str(np.random.get_state())  # noqa: NPY002


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_the_graph_module_of_a_program_with_a_region_in_it_runs_by_itself(device_type: str) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.linalg.matrix_exp(x) @ x
        return out

    amp = fxamp.convert(model, device_type=device_type, dtype=torch.bfloat16)
    result = amp(torch.eye(3))
    assert "run_in_region(autocast_cpu_bf16_on" in amp.graph_module.code
    assert torch.equal(amp.graph_module(torch.eye(3))[0], result)
