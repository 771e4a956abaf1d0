"""What is recorded, and what is refused with a telling text because a graph could not replay it."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxamp
from fxamp.capture.symbols import Sizes
from fxamp.errors import CaptureError, PolicyError
from fxamp.ir.text import show
from tests.passes.checks import captured


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        return gradients[0] * x * 2


def _hooked(x: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(lambda gradient: gradient * 2)
    return y + 1


def _retained(x: Tensor) -> Tensor:
    y = x * 2
    y.retain_grad()
    return y + 1


def _penalty(x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad((x * x).sum(), x, create_graph=True)
    return gradient.sum()


def _checkpointed(x: Tensor) -> Tensor:
    result: Tensor = checkpoint(torch.exp, x, use_reentrant=False, preserve_rng_state=False)
    return result


def _checkpointed_with_random_state(x: Tensor) -> Tensor:
    result: Tensor = checkpoint(torch.exp, x, use_reentrant=False)
    return result


def _seeded(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return x + torch.rand(2, 2)


def _inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x * 2


class _Subclass(Tensor):
    pass


_OWN = torch.Generator()
_KEPT = torch.ones(2, 2).as_subclass(_Subclass)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (_hooked, "a hook is registered on a tensor inside forward"),
        (_retained, r"retain_grad\(\) is called"),
        (_penalty, "gradients are taken inside forward"),
        (torch.vmap(torch.exp), r"torch\.func transform"),
        (lambda x: x * random.random(), "Python's or numpy's random numbers"),
        (lambda x: x * float(np.random.rand()), "Python's or numpy's random numbers"),  # noqa: NPY002
        (_seeded, "torch's random"),
        (lambda x: x + torch.rand(2, 2, generator=_OWN), "generator of the model's own"),
        (_inference, "inference mode"),
        (lambda x: x * 2 if bool(x.sum() > 0) else x, "DataDependent"),
        (lambda x: x * float(x.sum().item()), "DataDependent"),
        (lambda x: torch.mm(x.data, x), "out of the recorder's sight"),
        (lambda x: x + _KEPT, "tensors of class _Subclass"),
    ],
)
def test_what_a_graph_cannot_replay_is_refused(function: Callable[[Tensor], object], reason: str) -> None:
    with pytest.raises(CaptureError, match=reason):
        captured(function, torch.ones(2, 2, requires_grad=True))


def test_an_autograd_function_without_gradient_is_recorded_through() -> None:
    recorded = captured(lambda x: _Square.apply(x) + 1, torch.ones(2, 2))
    assert "mul(%x, %x)" in show(recorded.graph)


def test_an_operator_that_eager_autocast_refuses_is_refused_alike_and_with_its_place() -> None:
    low, other = torch.ones(2, dtype=torch.float16), torch.ones(2, dtype=torch.bfloat16)
    with pytest.raises(
        PolicyError, match=r"Unexpected floating ScalarType[^\n]*\n  at aten::cat \(test_recorder\.py"
    ):
        captured(lambda x, y: torch.cat([x, y]), low, other)


def test_operators_are_recorded_as_called_with_the_dtypes_that_eager_autocast_gives() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        z = torch.mm(x, y).add_(1)
        with torch.autocast("cpu", enabled=False), torch.no_grad():
            return z.float() @ y

    recorded = captured(program, torch.ones(2, 2, requires_grad=True), torch.ones(2, 2))
    assert (
        show(recorded.graph)
        == dedent("""
        %x: f32[2, 2] = input
        %y: f32[2, 2] = input
        %mm: bf16[2, 2] = mm(%x, %y)
        %add_: bf16[2, 2] = add_(%mm, 1)
        enter_region(autocast(cpu, off))
        _set_grad_enabled(False)
        %to: f32[2, 2] = to(%add_, f32)
        %matmul: f32[2, 2] = matmul(%to, %y)
        _set_grad_enabled(True)
        return [%matmul]
    """).strip()
    )


def test_tied_weights_are_one_source_and_constants_are_sources_of_their_own() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    table = torch.ones(2)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: Tensor) -> Tensor:
            return self.layers["b"](self.layers["a"](x)) + table + torch.tensor([1.0, 2.0])  # type: ignore[no-any-return]

    recorded = captured(Tied(), torch.ones(1, 2))
    assert [node.name for node in recorded.sources] == ["layers_a_weight", "_constant0", "_constant1"]


def test_a_tensor_made_from_numbers_is_a_fresh_copy_at_every_call() -> None:
    recorded = captured(lambda x: torch.tensor([1.0, 2.0]).add_(x), torch.ones(2))
    assert "%clone: f32[2] = clone(%_constant0)" in show(recorded.graph)


def test_an_operator_that_gives_back_its_argument_is_that_argument() -> None:
    recorded = captured(lambda x: x.float() * 2, torch.ones(2))
    assert "mul(%x, 2)" in show(recorded.graph)


def test_in_inference_mode_composites_are_opened_above_autocast() -> None:
    x = torch.ones(2, 2)
    with torch.inference_mode():
        recorded = captured(lambda x: torch.tensordot(x, x, dims=([1], [0])), x)
    assert "%tensordot: bf16[2, 2]" in show(recorded.graph)


def test_each_node_knows_its_module_and_its_source_line() -> None:
    recorded = captured(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.ones(1, 2))
    places = {node.name: node.meta["where"] for node in recorded.graph.nodes if "where" in node.meta}
    assert {name: where.module for name, where in places.items()} == {"linear": "0", "relu": "1"}
    assert places["linear"].source.startswith("return F.linear(")


def test_nothing_is_left_behind() -> None:
    states = torch.get_rng_state(), random.getstate()
    with pytest.raises(CaptureError):
        captured(lambda x: x.exp().item() + random.random(), torch.ones(1))
    captured(lambda x: x + torch.rand(2), torch.ones(2))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()


def test_a_model_whose_calls_were_captured_can_be_freed() -> None:
    models = [nn.Linear(2, 2)]
    alive = weakref.ref(models[0].weight)
    captured(models[0], torch.ones(3, 2), sizes=Sizes.ALL)
    with pytest.raises(CaptureError):
        captured(lambda x: models[0](x).item(), torch.ones(3, 2), sizes=Sizes.ALL)
    models.clear()
    gc.collect()
    assert alive() is None


def test_what_is_padded_without_gradients_requires_none() -> None:
    def asks(x: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(x[:, 1:], (0, 1), value=0.1)
        return padded * 2 if padded.requires_grad or padded.is_leaf is False else padded

    x = torch.ones(2, 4, requires_grad=True)
    with torch.no_grad():
        assert torch.equal(fxamp.convert(asks, device_type="cpu", dtype=torch.bfloat16)(x), asks(x))
