"""What ``compare`` says about runs, and what it leaves alone."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxamp
from fxamp.compare import Comparison
from tests.models import SmallCNN, SmallTransformer, equal

IMAGES = torch.randn(2, 3, 8, 8)


def test_bits_equal_to_eager_autocast_come_first() -> None:
    found = fxamp.compare(SmallCNN().eval(), IMAGES, dtype=torch.bfloat16)
    assert found.bits.equal is True
    assert str(found).splitlines()[0] == "Bits equal to eager autocast: yes"


def test_an_override_parts_from_eager_autocast_at_its_operator() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    policy = fxamp.Policy.native("cpu", torch.bfloat16).keep("float32", module="2")
    found = fxamp.compare(model, torch.randn(4, 8), policy=policy)
    assert found.bits.equal is False
    assert "aten::linear (module '2'" in found.bits.detail


def test_the_table_of_cuda_is_compared_on_the_cpu() -> None:
    found = fxamp.compare(SmallCNN().eval(), IMAGES, device_type="cuda", dtype=torch.float16)
    assert found.bits.equal is None
    assert found.outputs is not None
    assert found.min_sqnr > 40


def test_the_reference_is_a_plain_float32_run_bit_for_bit() -> None:
    """As seen from outside: an output without low precision on the way has no error at all."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.sin(self.norm(x)), self.head(x)

    found = fxamp.compare(Model(), torch.randn(3, 8), dtype=torch.bfloat16)
    (row,) = (row for row in found.rows if row.op == "aten::sin")
    assert row.arrived.max_abs == 0
    assert row.arrived.sqnr_db == math.inf


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("converted", [False, True])
def test_nothing_is_changed(train: bool, converted: bool) -> None:
    model = SmallCNN().train(train)
    state = copy.deepcopy(model.state_dict())
    attributes = {name: dict(module.__dict__) for name, module in model.named_modules()}
    subject = fxamp.convert(model, dtype=torch.bfloat16) if converted else model
    images = IMAGES.clone().requires_grad_()
    random = torch.get_rng_state()
    fxamp.compare(subject, images, backward=True, dtype=None if converted else torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert images.grad is None
    for name, module in model.named_modules():
        assert module.__dict__.keys() == attributes[name].keys()


def test_arguments_and_parameters_that_the_model_writes_to_are_put_back() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 4)
            self.calls = 0
            self.seen: list[int] = []

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen.append(self.calls)
            with torch.no_grad():
                self.head.weight.clamp_(-0.1, 0.1)
            x.mul_(2)
            y: Tensor = self.head(x)
            return y

    model, x = Model(), torch.ones(2, 4)
    weight = model.head.weight.detach().clone()
    found = fxamp.compare(model, x, ("float32",), dtype=torch.bfloat16)
    assert torch.equal(x, torch.ones(2, 4))
    assert torch.equal(model.head.weight, weight)
    assert (model.calls, model.seen) == (0, [])
    assert found.min_sqnr > 40  # both sides see the writes


def test_dropout_drops_the_same_elements_in_the_reference() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5)).train()
    found = fxamp.compare(model, torch.randn(16, 32), dtype=torch.float16)
    assert found.min_sqnr > 40


def test_gradients_are_compared_node_by_node_in_one_backward_pass() -> None:
    torch.manual_seed(0)
    model = SmallTransformer().eval()
    found = fxamp.compare(model, torch.randint(30, (2, 6)), dtype=torch.bfloat16, backward=True)
    rows = [row for row in found.rows if row.gradient is not None and row.gradient.count]
    assert len(rows) > 10
    assert any(row.op == "parameter" for row in rows)
    assert found.loss_scale == 1.0


def test_labels_of_a_loader_go_to_the_loss() -> None:
    loader = [(torch.randn(4, 8), torch.randint(3, (4,))) for _ in range(2)]
    model = nn.Linear(8, 3)
    loss = functional.cross_entropy
    found = fxamp.compare(model, loader, ("float32",), dtype=torch.bfloat16, backward=True, loss=loss)
    assert found.inputs == 2
    assert any(row.op == "aten::cross_entropy_loss" for row in found.rows)


def test_an_iterator_of_dicts_and_tensors() -> None:
    def items() -> Iterator[Any]:
        yield {"input": torch.randn(2, 8)}
        yield torch.randn(3, 8)

    assert fxamp.compare(nn.Linear(8, 2), items(), dtype=torch.bfloat16).inputs == 2


def test_a_model_with_eager_parts_says_which() -> None:
    class Seeded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.a.register_forward_hook(lambda module, args, out: out * 1.5)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.b(self.a(x))
            return y

    amp = fxamp.convert(Seeded(), dtype=torch.bfloat16)
    found = fxamp.compare(amp, torch.randn(3, 4))
    assert found.bits.equal
    assert "a" in found.bits.detail
    assert {row.where.module for row in found.rows if row.op == "aten::linear"} == {"a", "b"}


def test_values_that_python_reads_are_those_of_the_run() -> None:
    def model(x: Tensor) -> Tensor:
        y = x @ x.t()
        return y.relu() if y.sum() > 0 else y.exp()

    amp = fxamp.convert(model, device_type="cpu", dtype=torch.bfloat16)
    found = fxamp.compare(amp, torch.ones(4, 4))
    assert found.bits.equal
    assert any(row.op == "aten::relu" for row in found.rows)


def test_float64_tells_how_far_float32_itself_can_be_trusted() -> None:
    model = nn.Linear(64, 8)
    found = fxamp.compare(model, torch.randn(4, 64), ("float32", "float64"), dtype=torch.float16)
    (row,) = found.rows
    assert row.wide is not None
    assert row.wide.sqnr_db == pytest.approx(row.arrived.sqnr_db, abs=0.1)


def test_json_is_json() -> None:
    found = fxamp.compare(SmallCNN().eval(), IMAGES, dtype=torch.float16, backward=True)
    read = json.loads(found.to_json())
    assert read["bits_equal"] is True
    assert [row["op"] for row in read["rows"]] == [row.op for row in found.rows]
    assert sorted(row["rank"] for row in read["rows"]) == list(range(1, len(found.rows) + 1))
    assert "<pre" in found._repr_html_()


def test_printing_is_the_same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fxamp.compare(SmallCNN().eval(), IMAGES, dtype=torch.float16)
    monkeypatch.setenv("COLUMNS", "40")
    narrow = str(found)
    monkeypatch.setenv("COLUMNS", "200")
    assert str(found) == narrow
    assert "\x1b" not in narrow


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"against": ("float16",)}, "against is a sequence"),
        ({"against": ()}, "against is a sequence"),
        ({"loss": lambda out: out}, "backward=True"),
        ({"backward": True, "loss_scale": 0.0}, "positive"),
        ({"inputs": 3}, "inputs is a tensor"),
        ({"inputs": []}, "inputs is empty"),
    ],
)
def test_wrong_arguments_are_told(arguments: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"inputs": torch.ones(2, 4), "dtype": torch.bfloat16, **arguments}
    with pytest.raises(fxamp.ArgumentError, match=message):
        fxamp.compare(nn.Linear(4, 4), **given)


def test_a_crash_in_the_model_comes_through_as_it_is() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fxamp.compare(Broken(), torch.ones(2), dtype=torch.bfloat16, device_type="cpu")


def test_a_run_in_lockstep_has_the_bits_of_the_run() -> None:
    torch.manual_seed(0)
    model = SmallCNN().train()
    before = copy.deepcopy(model)
    found = fxamp.compare(model, IMAGES, dtype=torch.bfloat16)
    assert isinstance(found, Comparison)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.manual_seed(1)
        one = model(IMAGES)
        torch.manual_seed(1)
        assert equal(one, before(IMAGES))
