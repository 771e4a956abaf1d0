"""Which weights may be kept in low precision alone is read off programs and eager code."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fxamp
from fxamp.runtime.rounding import Uses, uses_in

BF16 = torch.bfloat16


class Many(nn.Module):
    """Weights with one use each, and of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.rounded, self.whole = nn.Linear(4, 4), nn.LayerNorm(4)
        self.twice = nn.Parameter(torch.randn(4, 4), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(4, 4))
        self.narrow = nn.Parameter(torch.randn(4, 4).to(BF16))
        self.turned = nn.Parameter(torch.randn(4, 4))
        self.spread = nn.Parameter(torch.randn(4, 1).expand(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        """Use them on *x*, ``(rows, 4)``."""
        x = self.whole(self.rounded(x)) @ self.turned.t() @ self.narrow @ self.spread
        with torch.autocast("cpu", torch.float16):
            y = x.float() @ self.twice
        return y + x.float() @ self.twice


def _uses(model: nn.Module, *, grad: bool = False) -> Uses:
    amp = fxamp.convert(model, dtype=BF16)
    with torch.set_grad_enabled(grad):
        amp(torch.ones(2, 4))
    return uses_in([amp._runner])


def test_a_weight_with_casts_to_one_dtype_alone_can_be_rounded() -> None:
    model = Many().eval()
    uses = _uses(model)
    low = {name: uses.low(weight) for name, weight in model.named_parameters()}
    assert {name for name, dtype in low.items() if dtype is BF16} == {
        "rounded.weight",
        "rounded.bias",
        "turned",
    }
    assert low["whole.weight"] is low["unused"] is low["narrow"] is low["twice"] is low["spread"] is None
    assert uses.programs == 1


def test_programs_for_training_say_nothing() -> None:
    assert _uses(Many().train()).programs == 0
    assert _uses(Many().eval(), grad=True).programs == 0


class Prints(nn.Module):
    """Counts in Python, so that its own code runs eagerly."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.child = nn.Parameter(torch.randn(4)), nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """*x* through the child."""
        self.calls += 1
        return torch.as_tensor(self.child(x)) * self.own


def test_eager_code_uses_the_weights_of_its_module_and_not_those_of_captured_children() -> None:
    model = Prints().eval()
    amp = fxamp.convert(model, dtype=BF16)
    with torch.no_grad():
        for _ in range(2):
            amp(torch.ones(2, 4))
    uses = uses_in([amp._runner])
    assert id(model.own) in uses.eager
    assert uses.low(model.own) is None
    assert uses.low(model.child.weight) is BF16


class _Shares(nn.Module):
    """Counts in Python, and uses its child's weight beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        result: Tensor = self.child(x) + x @ self.child.weight
        return result


class _SharesAgain(_Shares):
    """Has another child with a weight of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(4, 4)
        self.other.bias = self.child.bias

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.other(super().forward(x))
        return result


def test_a_child_that_shares_a_weight_with_eager_code_runs_eagerly_frozen_too_and_so_on() -> None:
    model = _SharesAgain().eval()
    amp = fxamp.convert(model, dtype=BF16)
    with torch.no_grad():
        for _ in range(2):
            amp(torch.ones(2, 4))
    uses = uses_in([amp._runner])
    assert uses.eager == set(map(id, model.parameters()))
    frozen = fxamp.freeze(amp)
    with torch.no_grad():
        for _ in range(2):
            frozen(torch.ones(2, 4))
    assert frozen.eager_modules == ("", "child", "other")
