"""What programs compute of weights alone is computed once, anew where a weight is written to, and shared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxamp
from fxamp.ir.cost import cost_of
from fxamp.runtime.frozen_module import FrozenModule
from tests.models import autocast

BF16 = torch.bfloat16
X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


class Scaled(nn.Module):
    """A scaled weight, a weight that is used rounded only, and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.gain = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.rand(8, 1))
        self.out = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor, times: float = 1.0) -> Any:
        """``(rows, 8)`` from ``(rows, 8)``."""
        x = functional.linear(x, self.w * self.gain) * times
        mixed = torch.mm(self.out.weight, self.out.weight)
        return self.out(x) + x @ mixed + torch.arange(8).add(1).cos()


def _frozen(model: nn.Module, *args: Any) -> FrozenModule:
    frozen: FrozenModule = fxamp.freeze(fxamp.convert(model.eval(), dtype=BF16), args or (X,))
    return frozen


def _eager(model: nn.Module, *args: Any) -> Any:
    with torch.no_grad(), autocast(BF16):
        return model(*args)


def test_a_call_has_the_bits_of_eager_autocast_and_no_kernel_for_weights() -> None:
    model = Scaled()
    frozen = _frozen(model)
    for rows in (1, 3, 5):
        assert torch.equal(frozen(X[:rows]), _eager(model, X[:rows]))
    cost = cost_of(frozen.graph_module)
    assert cost.weight_casts == 0
    kernels = sorted(step.name for step in cost.steps)
    assert kernels == ["add", "add", "linear", "linear", "matmul", "mul", "to"]


def test_programs_share_what_is_derived() -> None:
    frozen = _frozen(Scaled())
    for times in (2.0, 3.0):
        frozen(X, times)
    assert len(frozen.graph_modules) == 3
    assert len(frozen._weights.derived()) == 3
    stored = {value.data_ptr() for module in frozen.graph_modules for value in module.buffers()}
    assert {value.data_ptr() for value in frozen._weights.derived()} <= stored


def _by_hand(frozen: FrozenModule, model: nn.Module) -> None:
    for weights in (dict(frozen.named_parameters()), dict(model.named_parameters())):
        weights["gain"].mul_(1.5)


def _by_state_dict(frozen: FrozenModule, model: nn.Module) -> None:
    torch.manual_seed(1)
    model.load_state_dict({name: torch.randn_like(value) for name, value in model.state_dict().items()})
    frozen.load_state_dict(model.state_dict())


def _by_state_dict_of_a_part(frozen: FrozenModule, model: nn.Module) -> None:
    """Of the weight that is stored rounded alone, and takes part in a product of weights."""
    state = {"out.weight": torch.randn(8, 8)}
    model.load_state_dict(state, strict=False)
    frozen.load_state_dict(state, strict=False)


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
@pytest.mark.parametrize("change", [_by_hand, _by_state_dict, _by_state_dict_of_a_part])
def test_what_is_derived_follows_the_weights(
    change: Callable[[FrozenModule, nn.Module], None], mode: str
) -> None:
    model = Scaled()
    frozen = _frozen(model)
    before = _eager(model, X)
    assert torch.equal(frozen(X), before)
    memory = [value.data_ptr() for value in frozen._weights.derived()]
    with torch.no_grad():
        change(frozen, model)
    with getattr(torch, mode)():
        assert torch.equal(frozen(X), _eager(model, X))
    assert not torch.equal(frozen(X), before)
    assert [value.data_ptr() for value in frozen._weights.derived()] == memory  # CUDA graphs read it there


def test_the_state_dict_is_that_of_the_model() -> None:
    frozen = _frozen(Scaled())
    state = frozen.state_dict()
    assert {name: value.dtype for name, value in state.items()} == {
        "w": torch.float32,
        "gain": torch.float32,
        "out.weight": BF16,
    }
    other = _frozen(Scaled())
    other.load_state_dict(state)
    assert torch.equal(other(X), frozen(X))


def test_a_copy_and_a_move_compute_anew() -> None:
    frozen = _frozen(Scaled())
    expected = frozen(X)
    copied = copy.deepcopy(frozen)
    frozen.load_state_dict({name: value * 0 for name, value in frozen.state_dict().items()})
    assert torch.equal(copied(X), expected)
    assert not copied.to("meta")._weights.derived()


def test_the_bytes_that_are_kept_are_told() -> None:
    frozen = _frozen(Scaled())
    stored = 4 * (64 + 8) + 2 * 64  # w, gain; out.weight is stored rounded alone
    derived = 2 * 64 + 2 * 64 + 4 * 8
    assert f"weights: {stored + derived:,} bytes" in frozen.extra_repr()


class Given(nn.Module):
    """Gives away what it computes of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Any:
        """A product, and the scaled weight."""
        scaled = self.w * 2
        return x @ scaled, scaled, torch.zeros(3), scaled.to(BF16)


def test_what_a_call_gives_is_new_in_each_call() -> None:
    model = Given()
    frozen = _frozen(model)
    for _ in range(3):
        results = frozen(X)
        assert all(map(torch.equal, results, _eager(model, X)))
        for result in results:
            result.add_(1)


TABLE = torch.randn(8, generator=torch.Generator().manual_seed(1))


class Closure(nn.Module):
    """Reads a tensor that is in no module."""

    def forward(self, x: Tensor) -> Tensor:
        """*x* by the table."""
        return x * TABLE.exp()


def test_a_tensor_in_no_module_that_is_written_to_is_seen() -> None:
    frozen = _frozen(Closure())
    assert len(frozen._weights.derived()) == 1
    assert torch.equal(frozen(X), Closure()(X))
    TABLE.mul_(2)
    assert torch.equal(frozen(X), Closure()(X))


HIDDEN = nn.Linear(8, 8)


class Outside(nn.Module):
    """Uses a weight of a module that is no part of it, whose data may be put in its place unseen."""

    def forward(self, x: Tensor) -> Tensor:
        """*x* by the weight."""
        return x @ HIDDEN.weight.exp()


def test_a_weight_outside_of_the_model_is_computed_with_in_each_call() -> None:
    frozen = _frozen(Outside())
    assert not frozen._weights.derived()
    HIDDEN.weight.data = torch.randn(8, 8)
    assert torch.equal(frozen(X), _eager(Outside(), X))


class Writes(Scaled):
    """Halves its gain in some calls."""

    def forward(self, x: Tensor, times: float = 1.0, write: bool = False) -> Any:
        """As before."""
        if write:
            with torch.no_grad():
                self.gain.mul_(0.5)
        return super().forward(x, times)


def test_a_call_that_writes_to_a_weight_is_seen_by_the_others() -> None:
    model = Writes()
    frozen = _frozen(copy.deepcopy(model))
    for write in (False, True, False, True, True, False):
        assert torch.equal(frozen(X, 1.0, write), _eager(model, X, 1.0, write))


class Norms(nn.Module):
    """Parametrized layers, of both kinds that torch has."""

    def __init__(self) -> None:
        super().__init__()
        normed = nn.utils.parametrizations
        self.layers = nn.Sequential(
            normed.weight_norm(nn.Linear(8, 8)), normed.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 8)
        )

    def forward(self, x: Tensor) -> Any:
        """*x* through all."""
        return self.layers(x)


@pytest.mark.parametrize("consume", [False, True])
def test_a_parametrized_weight_is_computed_once(*, consume: bool) -> None:
    model = Norms().eval()
    expected = _eager(model, X)
    frozen = fxamp.freeze(fxamp.convert(copy.deepcopy(model), dtype=BF16), (X,), consume=consume)
    assert torch.equal(frozen(X), expected)
    assert "_weight_norm" not in {step.name for step in cost_of(frozen.graph_module).steps}


@pytest.fixture
def _double_by_default() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_double_by_default")
def test_what_is_made_of_numbers_has_the_default_dtype_of_the_call() -> None:
    model = Scaled()
    frozen = _frozen(model)
    for default in (torch.float64, torch.float32, torch.float64):
        torch.set_default_dtype(default)
        found, expected = frozen(X), _eager(model, X)
        assert found.dtype is expected.dtype is default
        assert torch.equal(found, expected)
    other = Scaled().float()
    frozen.load_state_dict(other.state_dict())  # computes what is derived of both defaults anew
    torch.set_default_dtype(torch.float32)
    assert torch.equal(frozen(X), _eager(other, X))


class Tabled(nn.Module):
    """A gather from a weight by an index of the model's, and a table that a call may bind anew."""

    index: Tensor
    table: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(5))
        self.out = nn.Linear(8, 8)
        self.register_buffer("index", torch.tensor([0, 1, 4, 4, 2, 3, 0, 1]), persistent=False)
        self.register_buffer("table", torch.rand(8))

    def forward(self, x: Tensor, step: str = "") -> Tensor:
        """``(rows, 8)`` from ``(rows, 8)``."""
        if step == "bind":
            self.table = torch.rand(8, generator=torch.Generator().manual_seed(3))
        if step == "double":
            self.table = self.table.double()  # type: ignore[union-attr]
        assert self.table is not None
        y: Tensor = self.out(x) + self.bias[self.index] + self.table.exp().log1p().to(x.dtype)
        return y


def _kernels(frozen: FrozenModule) -> list[str]:
    return sorted(step.name for step in cost_of(frozen.graph_module).steps)


def test_what_depends_on_buffers_is_computed_once() -> None:
    model = Tabled()
    frozen = _frozen(model)
    assert torch.equal(frozen(X), _eager(model, X))
    assert _kernels(frozen) == ["add", "add", "linear", "to"]


@pytest.mark.parametrize("name", ["index", "table"])
def test_what_is_derived_follows_a_buffer_that_is_written_to(name: str) -> None:
    model = Tabled()
    frozen = _frozen(model)
    before = frozen(X)
    for buffers in (dict(model.named_buffers()), dict(frozen.named_buffers())):
        buffers[name].copy_(buffers[name].flip(0))
    assert torch.equal(frozen(X), _eager(model, X))
    assert not torch.equal(frozen(X), before)


@pytest.mark.parametrize("step", ["bind", "double"])
def test_what_is_derived_follows_a_buffer_that_another_call_binds(step: str) -> None:
    model = Tabled()
    frozen = _frozen(copy.deepcopy(model))
    for each in ("", step, "", ""):
        assert torch.equal(frozen(X, each), _eager(model, X, each)), each


def test_what_is_derived_follows_a_buffer_that_is_another_tensor() -> None:
    model = Tabled()
    frozen = _frozen(model)
    for table in (torch.rand(8), torch.rand(16)[::2], torch.inference_mode()(torch.rand)(8), torch.rand(8)):
        for tree in (model, frozen._tree):
            tree.table = table.clone() if not table.is_inference() else table
        assert torch.equal(frozen(X), _eager(model, X))
        assert torch.equal(frozen(X), _eager(model, X))


def test_a_mask_of_a_known_size_is_computed_once() -> None:
    class Windowed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.out(x)
            regions = x.new_zeros((4, 4))
            regions[:2, 2:] = 1
            regions[2:] = 2
            flat = regions.view(2, 2, 2, 2).permute(0, 2, 1, 3).reshape(1, 16)
            mask = torch.zeros_like(flat - flat.t()).masked_fill(flat != flat.t(), -100.0)
            return x @ x.t() + mask[: x.shape[0], : x.shape[0]]

    model = Windowed()
    frozen = _frozen(model)
    assert torch.equal(frozen(X), _eager(model, X))
    assert _kernels(frozen) == ["add", "linear", "matmul", "to"]


def test_what_torch_cannot_compute_is_no_fault_of_fxamp() -> None:
    class Resized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(1, 3, 8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return x + functional.interpolate(self.table.half(), (4, 4), mode="bicubic", antialias=True)

    x = torch.randn(1, 3, 4, 4)
    with pytest.raises(RuntimeError, match="not implemented for 'Half'"), torch.no_grad():
        Resized()(x)
    frozen = _frozen(Resized(), x)
    (reason,) = [piece.reason for piece in frozen.report().eager]
    assert "depends on weights alone cannot be computed" in reason
    assert "test_derived_weights.py" in reason
    with pytest.raises(RuntimeError, match="not implemented for 'Half'"):
        frozen(x)
