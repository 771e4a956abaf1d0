"""A program that no longer fits the model or the call is not run."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fxamp

BF16 = torch.bfloat16


class Pair(nn.Module):
    """Two linears; the first takes a difference if it is given two tensors in a list."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.more = nn.Sequential(nn.Tanh())
        self.dropout = nn.Dropout(0.5)
        if tied:
            self.other.weight = self.one.weight

    def forward(self, x: Tensor | list[Tensor], y: Tensor | None = None, factor: float = 1.0) -> Tensor:
        """Of one input, or of two."""
        first = x if isinstance(x, Tensor) else x[0] - x[1]
        left: Tensor = self.dropout(self.more(self.one(first))) * self.one.weight.shape[0]
        right: Tensor = self.other(first if y is None else y)
        return left + right * factor


def agree(model: nn.Module, amp: fxamp.AmpModule, *args: object, **kwargs: object) -> None:
    """Three calls, since the second and third may take a shorter way than the first."""
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=BF16):
        expected = model(*args, **kwargs)
    for _ in range(3):
        torch.manual_seed(0)
        found = amp(*args, **kwargs)
        assert torch.equal(found, expected)
        assert found.requires_grad == expected.requires_grad


def gradients(model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    torch.manual_seed(0)
    return list(torch.autograd.grad(call(x).float().sum(), list(model.parameters())))


def tie(model: Pair) -> None:
    model.other.weight = model.one.weight


def untie(model: Pair) -> None:
    model.other.weight = nn.Parameter(torch.randn(8, 8))


def freeze(model: Pair) -> None:
    model.one.weight.requires_grad = False


def narrow(model: Pair) -> None:
    model.one.weight.data = model.one.weight.data.bfloat16()


def resize(model: Pair) -> None:
    model.one.weight.data, model.one.bias.data = torch.randn(1, 8), torch.randn(1)


def append(model: Pair) -> None:
    model.more.append(nn.ReLU())


def replace(model: Pair) -> None:
    model.one = nn.Linear(8, 8)


@pytest.mark.parametrize("change", [tie, untie, freeze, narrow, resize, append, replace])
def test_a_change_of_the_model_is_seen(change: Callable[[Pair], None]) -> None:
    model = Pair(tied=change is untie)
    amp = fxamp.convert(model, dtype=BF16)
    x = torch.randn(2, 8)
    agree(model, amp, x)
    change(model)
    agree(model, amp, x)
    if change is not freeze:
        with torch.autocast("cpu", dtype=BF16):
            expected = gradients(model, model, x)
        for found, wanted in zip(gradients(model, amp, x), expected, strict=True):
            assert torch.equal(found, wanted)


def test_calls_that_look_alike_are_told_apart() -> None:
    model = Pair()
    amp = fxamp.convert(model, dtype=BF16)
    x, y = torch.randn(2, 8), torch.randn(2, 8)
    for _ in range(2):
        for args in ((x,), (x, y), (x, x), ([x, y], None), (x, y), ([x, y],), (x, y, 2.0), (x, y, 3.0), (x,)):
            agree(model, amp, *args)
        agree(model, amp, x, factor=2.0)
        for other in (x.bfloat16(), torch.randn(8, 2).t(), torch.randn(5, 8), x.clone().requires_grad_()):
            agree(model, amp, other)
            agree(model, amp, x)


def test_the_mode_of_the_call_is_seen() -> None:
    model = Pair()
    amp = fxamp.convert(model, dtype=BF16)
    x = torch.randn(2, 8)
    for _ in range(2):
        agree(model, amp, x)
        with torch.no_grad():
            agree(model, amp, x)
        with torch.inference_mode():
            agree(model, amp, x)
        with torch.autocast("cpu", dtype=BF16):
            agree(model, amp, x)
        model.dropout.eval()
        agree(model, amp, x)
        model.dropout.train()
        handle = model.one.register_forward_hook(lambda module, args, result: result * 2)
        agree(model, amp, x)
        handle.remove()


def test_a_surrounding_region_is_left_as_it_was() -> None:
    amp = fxamp.convert(Pair(), dtype=BF16)
    with torch.autocast("cpu", dtype=torch.float16):
        assert amp(torch.randn(2, 8)).dtype is BF16
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") is torch.float16
    assert not torch.is_autocast_enabled("cpu")


def test_the_graph_that_served_the_last_call_is_known_on_the_short_way_too() -> None:
    amp = fxamp.convert(Pair(), dtype=BF16)
    x = torch.randn(2, 8)
    amp(x)
    amp(x)
    first = amp.graph_module
    amp.capture(x, x.clone())
    assert amp.graph_module is not first
    amp(x)
    amp(x)
    assert amp.graph_module is first
