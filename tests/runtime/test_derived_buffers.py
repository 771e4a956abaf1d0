"""What programs compute of buffers is computed once, and never served when a buffer may have changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fxamp
from fxamp.ir.cost import cost_of
from fxamp.runtime.frozen_module import FrozenModule
from tests.counts import Counts
from tests.models import autocast

BF16 = torch.bfloat16
X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


class Windows(nn.Module):
    """Attention with a table of biases that is read by a buffer of relative positions, as Swin has it."""

    index: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 2))
        places = torch.arange(4)
        self.register_buffer("index", (places[:, None] - places + 3).flatten(), persistent=False)
        self.register_buffer("mask", torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1) > 0, -100.0))
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        """``[batch, 4, 8]`` from ``[batch, 4, 8]``."""
        q, k, v = self.qkv(x).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.table[self.index].view(4, 4, -1).permute(2, 0, 1).contiguous().unsqueeze(0)
        scores = q @ k.transpose(2, 3) + (bias + self.mask)
        return self.out((scores.softmax(3) @ v).transpose(1, 2).flatten(2))


class FrozenNorm(nn.Module):
    """A batch norm whose statistics do not change, written in arithmetic, as detectors have it."""

    weight: Tensor
    bias: Tensor
    mean: Tensor
    var: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name, value in (("weight", 1.5), ("bias", 0.5), ("mean", 0.1), ("var", 2.0)):
            self.register_buffer(name, torch.full((8,), value))
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        """``[rows, 8]`` from ``[rows, 8]``."""
        scale = self.weight * (self.var + 1e-5).rsqrt()
        return self.linear(x) * scale + (self.bias - self.mean * scale)


def _frozen(model: nn.Module, *args: Any) -> FrozenModule:
    frozen: FrozenModule = fxamp.freeze(fxamp.convert(model.eval(), dtype=BF16), args or (X,))
    return frozen


def _eager(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad(), autocast(BF16):
        return model(*args, **kwargs)


def _kernels(frozen: FrozenModule) -> list[str]:
    return sorted(step.name for step in cost_of(frozen.graph_module).steps)


def test_a_table_that_is_read_by_a_buffer_is_computed_once() -> None:
    model, x = Windows(), torch.randn(2, 4, 8)
    frozen = _frozen(model, x)
    for rows in (2, 1):
        with Counts(()) as counts:
            found = frozen(x[:rows])
        assert torch.equal(found, _eager(model, x[:rows]))
    assert counts.casts == 2
    assert _kernels(frozen) == [
        "add",
        "flatten",
        "linear",
        "linear",
        "matmul",
        "matmul",
        "softmax",
        "to",
        "to",
    ]


def test_a_norm_in_arithmetic_is_one_product_and_one_sum() -> None:
    model = FrozenNorm()
    frozen = _frozen(model)
    assert torch.equal(frozen(X), _eager(model, X))
    assert _kernels(frozen) == ["add", "linear", "mul", "to"]


# --- each way in which a buffer changes ---------------------------------------------------------------


def _in_place(frozen: FrozenModule, model: nn.Module) -> None:
    for buffers in (dict(frozen.named_buffers()), dict(model.named_buffers())):
        buffers["var"].mul_(1.5)


def _through_state_dict(frozen: FrozenModule, model: nn.Module) -> None:
    for state in (frozen.state_dict(), model.state_dict()):
        state["mean"].add_(1)


def _loaded(frozen: FrozenModule, model: nn.Module) -> None:
    model.load_state_dict({name: torch.rand_like(value) for name, value in model.state_dict().items()})
    frozen.load_state_dict(model.state_dict())


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
@pytest.mark.parametrize("change", [_in_place, _through_state_dict, _loaded])
def test_what_is_derived_follows_the_buffers(
    change: Callable[[FrozenModule, nn.Module], None], mode: str
) -> None:
    model = FrozenNorm()
    frozen = _frozen(model)
    before = frozen(X)
    memory = [value.data_ptr() for value in frozen._weights.derived()]
    with torch.no_grad():
        change(frozen, model)
    with getattr(torch, mode)():
        assert torch.equal(frozen(X), _eager(model, X))
    assert not torch.equal(frozen(X), before)
    assert len(frozen.graph_modules) == (1 if mode == "no_grad" else 2)
    assert [value.data_ptr() for value in frozen._weights.derived()] == memory


def test_a_copy_and_a_move_compute_anew() -> None:
    frozen = _frozen(FrozenNorm())
    expected, copied = frozen(X), copy.deepcopy(frozen)
    for buffer in frozen.buffers():
        buffer.zero_()
    assert torch.equal(copied(X), expected)
    assert not copied.to("meta")._weights.derived()


class Changing(nn.Module):
    """Reads a table in every call, and in some calls does to it what *change* says, before or behind."""

    table: Tensor
    other: Tensor
    CHANGES: dict[str, Callable[[Changing], object]]

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.rand(8, generator=torch.Generator().manual_seed(0)) + 1)
        self.register_buffer("other", self.table * 2)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, change: str = "", *, first: bool = True) -> Any:
        """*x* by the table."""
        if change and first:
            self.CHANGES[change](self)
        x = self.linear(x) * self.table.exp().rsqrt()
        if change and not first:
            self.CHANGES[change](self)
        return x


def _batch_norm(model: Changing) -> None:
    functional.batch_norm(torch.ones(2, 8) * model.table, model.table, model.other, training=True)


def _rebind(model: Changing) -> None:
    model.table = model.table * 0.5


def _swap(model: Changing) -> None:
    model.table, model.other = model.other, model.table


Changing.CHANGES = {
    "in place": lambda model: model.table.mul_(0.5),
    "through a view": lambda model: model.table[2:].add_(1),
    "through data": lambda model: model.table.data.mul_(0.5),
    "through detach": lambda model: model.table.detach().copy_(model.other),
    "statistics": _batch_norm,
    "rebind": _rebind,
    "swap": _swap,
}


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("change", Changing.CHANGES)
def test_a_call_that_changes_a_buffer_is_seen_by_itself_and_by_others(
    change: str, mode: str, *, first: bool
) -> None:
    model = Changing().eval()
    frozen = _frozen(copy.deepcopy(model))
    assert len(frozen._weights.derived()) == 1
    with getattr(torch, mode)():
        for now in ("", change, "", change, change, "", ""):
            assert torch.equal(frozen(X, now, first=first), _eager(model, X, now, first=first))
    assert bool(frozen.eager_modules) == (change == "through data")


class Rebinds(Changing):
    """Puts another table in the place of the one that it reads."""

    def forward(self, x: Tensor, change: str = "rebind", *, first: bool = False) -> Any:  # noqa: D102
        return super().forward(x, change, first=first)


def test_a_buffer_that_a_call_replaces_is_one_of_an_artifact(tmp_path: Path) -> None:
    model = Rebinds().eval()
    fxamp.export(copy.deepcopy(model), (X,), tmp_path / "model.pt2", dtype=BF16, check=False)
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for _ in range(3):
        assert torch.equal(loaded(X), _eager(model, X))


class Eager(Changing):
    """What it does to the table in some calls is done in a way that cannot be captured."""

    def forward(self, x: Tensor, change: str = "", *, first: bool = True) -> Any:  # noqa: D102
        if change:
            torch.func.vmap(torch.neg)(x)
            self.CHANGES[change](self)
        return super().forward(x)


Eager.CHANGES = {**Changing.CHANGES, "numpy": lambda model: np.negative(*2 * [model.table.numpy()])}


@pytest.mark.parametrize("change", Eager.CHANGES)
def test_a_call_that_runs_eagerly_is_seen_by_the_others(change: str) -> None:
    model = Eager().eval()
    frozen = _frozen(copy.deepcopy(model))
    assert len(frozen._weights.derived()) == 1
    for now in ("", change, "", change, change, "", ""):
        assert torch.equal(frozen(X, now), _eager(model, X, now))
    assert frozen.eager_modules


class Overlapping(nn.Module):
    """Two buffers in one memory, of which no version of either tells."""

    table: Tensor
    same: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.rand(8))
        self.register_buffer("same", self.table.data)

    def forward(self, x: Tensor, change: bool = False) -> Any:  # noqa: D102
        if change:
            self.same.mul_(0.5)
        return x * self.table.exp()


def test_buffers_in_one_memory_are_left_alone() -> None:
    model = Overlapping().eval()
    ours = Overlapping().eval()
    ours.load_state_dict(model.state_dict())
    frozen = fxamp.freeze(fxamp.convert(ours, dtype=BF16), (X,), consume=True)
    assert not frozen._weights.derived()
    for change in (False, True, False):
        assert torch.equal(frozen(X, change), _eager(model, X, change))


class Tied(nn.Module):
    """One buffer in two places, of which a call gives one another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = FrozenNorm(), FrozenNorm()
        self.two.var = self.one.var

    def forward(self, x: Tensor, change: bool = False) -> Any:  # noqa: D102
        if change:
            self.two.var = self.two.var * 2
        return self.two(self.one(x))


def test_a_buffer_that_is_no_longer_tied_is_seen() -> None:
    model = Tied().eval()
    frozen = _frozen(copy.deepcopy(model))
    for change in (False, True, False, True, False):
        assert torch.equal(frozen(X, change), _eager(model, X, change))


def test_compiled_code_is_left_with_programs_whose_buffers_stay() -> None:
    frozen = _frozen(Changing())
    (program,) = frozen._runner.traceables
    assert program.settled()
    with torch.no_grad():
        frozen(X, "statistics")
    assert program not in frozen._runner.traceables


def test_another_buffer_of_the_same_size_is_seen() -> None:
    model = Changing().eval()
    frozen = _frozen(copy.deepcopy(model))
    model.table = frozen._tree.table = torch.rand(8)  # as nothing does that is known of
    assert torch.equal(frozen(X), _eager(model, X))


def test_a_buffer_of_another_size_is_no_obstacle_to_loading() -> None:
    frozen = _frozen(Changing())
    frozen._tree.table = torch.rand(3)
    frozen.load_state_dict({"linear.bias": torch.zeros(8)}, strict=False)
    with pytest.raises(RuntimeError, match="size of tensor"):
        frozen(X)
