"""What a recording leaves in caches of the user's is real."""

from __future__ import annotations

import functools
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import fxamp

BF16 = torch.bfloat16


@functools.lru_cache(maxsize=4)
def table(count: int) -> Tensor:
    return torch.arange(count).float() * 2


class Cached(nn.Module):
    """Keeps a table in a function's cache."""

    def forward(self, x: Tensor) -> Tensor:
        """Uses it."""
        return x * table(4)


class Shelved(nn.Module):
    """Keeps tables in a dict of the class."""

    shelf: ClassVar[dict[str, Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        """Fills the dict once."""
        if "a" not in self.shelf:
            a = torch.mm(torch.ones(4, 4), torch.eye(4))
            self.shelf.update(a=a, b=a.reshape(2, 8), c=x.shape[0] * torch.ones(1))
        return x @ self.shelf["a"]


class Fails(nn.Module):
    """Is recorded twice, since it needs a plain size; the first recording is given up."""

    def forward(self, x: Tensor) -> Tensor:
        """Fills the function's cache before."""
        y = x * table(4)
        return y.reshape(int(x.shape[0].__index__()), 4)


@pytest.fixture(autouse=True)
def _empty() -> None:
    table.cache_clear()
    Shelved.shelf.clear()


@pytest.mark.parametrize("model", [Cached(), Shelved(), Fails()], ids=lambda model: type(model).__name__)
def test_the_model_itself_and_a_second_conversion_see_real_tensors(model: nn.Module) -> None:
    x = torch.randn(3, 4)
    amp = fxamp.convert(model, (x,), device_type="cpu", dtype=BF16)
    for kept in (*Shelved.shelf.values(), table(4)):
        assert type(kept) is torch.Tensor
    with torch.autocast("cpu", BF16):
        wanted = model(x)
    assert torch.equal(amp(x), wanted)
    again = fxamp.convert(model, device_type="cpu", dtype=BF16)
    assert torch.equal(again(x), wanted)
    assert again.eager_modules == ()


def test_what_is_kept_has_the_dtype_that_autocast_gives_it_and_the_sizes_of_the_call() -> None:
    fxamp.convert(Shelved(), (torch.randn(3, 4),), device_type="cpu", dtype=BF16)
    assert torch.equal(Shelved.shelf["a"], torch.ones(4, 4, dtype=BF16))
    assert torch.equal(Shelved.shelf["b"], torch.ones(2, 8, dtype=BF16))
    assert torch.equal(Shelved.shelf["c"], torch.tensor([3.0]))


def test_a_model_that_keeps_nothing_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    from fxamp.capture import left_behind  # noqa: PLC0415

    monkeypatch.setattr(left_behind._Values, "of", lambda self, node: pytest.fail(f"{node} is computed"))
    model = nn.Sequential(nn.Linear(4, 4), nn.Flatten(0), nn.Softmax(0))
    with torch.no_grad():
        fxamp.convert(model, (torch.randn(3, 4),), dtype=BF16)
