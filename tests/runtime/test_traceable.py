"""``torch.compile`` goes straight through a frozen module: one graph, no break, the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxamp
from tests.models import SmallCNN, SmallTransformer, autocast

BF16 = torch.bfloat16


class Counter:
    """A backend that runs graphs as they are, and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:  # noqa: D102
        self.graphs.append(module)
        return module.forward


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _frozen(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return fxamp.freeze(fxamp.convert(model.eval(), dtype=BF16), args, kwargs)


def _compiled(frozen: Any, backend: Counter, *, fullgraph: bool = True) -> Any:
    return torch.compile(frozen, backend=backend, fullgraph=fullgraph)


def _text(module: torch.fx.GraphModule) -> str:
    return str(module.code)


def test_a_frozen_module_is_one_graph_without_a_weight_cast() -> None:
    model = SmallCNN()
    frozen, backend = _frozen(model, torch.randn(2, 3, 8, 8)), Counter()
    compiled = _compiled(frozen, backend)
    for rows in (2, 5):
        x = torch.randn(rows, 3, 8, 8)
        with torch.no_grad():
            with autocast(BF16):
                expected = model(x)
            assert torch.equal(compiled(x), expected)
    assert _text(backend.graphs[0]).count(".bfloat16()") == 1
    assert "autocast" not in _text(backend.graphs[0])


def test_a_region_around_the_compiled_call_has_no_influence() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    x = torch.randn(2, 4)
    frozen = _frozen(model, x)
    compiled = _compiled(frozen, Counter())
    with torch.no_grad():
        expected = frozen(x)
        for dtype in (torch.float16, BF16):
            with autocast(dtype):
                assert torch.equal(compiled(x), expected)
    assert torch.equal(compiled(x), expected)  # where gradients are recorded, too


class _Structured(nn.Module):
    """Takes a keyword and a flag, returns tensors in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, scale: Tensor, both: bool = True) -> dict[str, Any]:
        y = self.f(x) * scale
        return {"out": y, "pair": (x, [y.sum()] if both else None)}


def test_keywords_constants_and_structures_go_through() -> None:
    x, scale = torch.randn(2, 4), torch.tensor(3.0)
    frozen, backend = _frozen(_Structured(), x, scale=scale), Counter()
    compiled = _compiled(frozen, backend)
    with torch.no_grad():
        found, expected = compiled(x, scale=scale), frozen(x, scale=scale)
    assert torch.equal(found["out"], expected["out"])
    assert torch.equal(found["pair"][1][0], expected["pair"][1][0])
    assert found["pair"][0] is x
    assert len(backend.graphs) == 1


def test_a_call_without_a_program_runs_beside_the_compiled_code() -> None:
    x, scale = torch.randn(2, 4), torch.tensor(3.0)
    frozen, backend = _frozen(_Structured(), x, scale=scale), Counter()
    compiled = _compiled(frozen, backend, fullgraph=False)
    with torch.no_grad():
        found = compiled(x, scale=scale, both=False)
        assert torch.equal(found["out"], frozen(x, scale=scale)["out"])
    assert found["pair"][1] is None
    assert backend.graphs == []


def test_other_kinds_of_inputs_take_their_own_programs() -> None:
    frozen = _frozen(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4))
    with torch.no_grad():
        inputs = [torch.randn(2, 4), torch.randn(2, 4).to(BF16), torch.randn(2, 3, 4)]
        expected = [frozen(x) for x in inputs]
        compiled = _compiled(frozen, Counter())
        assert all(torch.equal(compiled(x), out) for x, out in zip(inputs, expected, strict=True))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_kernel_that_consults_autocast_itself_runs_beside_the_compiled_code(backend: str) -> None:
    tokens = torch.randint(0, 30, (2, 5))
    frozen = _frozen(SmallTransformer(), tokens)  # the fast path of nn.TransformerEncoderLayer
    with torch.no_grad():
        compiled: Any = torch.compile(frozen, backend=backend)
        found = compiled(tokens)
        assert torch.equal(found["logits"], frozen(tokens)["logits"])


class Scaled(nn.Module):
    """A weight that is computed from others, and a table in the default dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.rand(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        """``(rows, 8)`` from ``(rows, 8)``."""
        return nn.functional.linear(x, self.weight * self.gain) + torch.arange(8).add(1).cos()


def _eager(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad(), autocast(BF16):
        result: Tensor = model(x)
    return result


def test_a_load_that_raises_after_it_has_copied_is_seen_by_the_compiled_code() -> None:
    x, other = torch.randn(2, 8), Scaled()
    frozen = _frozen(Scaled(), x)
    compiled = _compiled(frozen, Counter())
    compiled(x)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        frozen.load_state_dict({**other.state_dict(), "more": x})
    assert torch.equal(compiled(x), _eager(other, x))


def test_the_compiled_code_is_that_of_the_default_dtype() -> None:
    model, x = Scaled(), torch.randn(2, 8)
    frozen = _frozen(model, x)
    compiled = _compiled(frozen, Counter(), fullgraph=False)
    assert compiled(x).dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        found, expected = compiled(x), _eager(model, x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype is torch.float64
    assert torch.equal(found, expected)
