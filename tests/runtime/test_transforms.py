"""A converted model under torch's function transforms, and gradients of gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.utils import _pytree as pytree

import fxamp
from tests.models import autocast, equal

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


def _models() -> tuple[nn.Module, fxamp.AmpModule]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, fxamp.convert(copy.deepcopy(model), device_type="cpu", dtype=torch.bfloat16)


def _loss(model: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    out: Tensor = functional_call(model, parameters, (x,))
    return out.float().square().sum()


def _gradients(model: nn.Module) -> Any:
    return grad(lambda own: _loss(model, own, X))(dict(model.named_parameters()))


def _gradients_per_sample(model: nn.Module) -> Any:
    own = dict(model.named_parameters())
    return vmap(lambda x: grad(lambda parameters: _loss(model, parameters, x[None]))(own))(X)


TRANSFORMS: dict[str, Callable[[nn.Module], Any]] = {
    "grad": _gradients,
    "vmap of grad": _gradients_per_sample,
    "vmap": lambda model: vmap(lambda x: model(x))(X),  # noqa: PLW0108  a module is no function to vmap
    "jacrev": lambda model: jacrev(lambda x: model(x))(X),  # noqa: PLW0108
    "jvp": lambda model: jvp(lambda x: model(x), (X,), (torch.ones_like(X),)),  # noqa: PLW0108
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
@pytest.mark.parametrize("captured", [False, True], ids=["at once", "after a plain call"])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_a_transform_of_a_converted_model(transform: Callable[[nn.Module], Any], captured: bool) -> None:
    model, amp = _models()
    if captured:
        amp(X)
        amp(X.clone().requires_grad_())
    with autocast(torch.bfloat16):
        expected = transform(model)
    for one, other in zip(pytree.tree_leaves(transform(amp)), pytree.tree_leaves(expected), strict=True):
        assert equal(one, other)


def test_a_gradient_penalty_has_second_order_gradients() -> None:
    model, amp = _models()
    for _ in range(2):
        for call, scope in ((model, autocast(torch.bfloat16)), (amp, torch.enable_grad())):
            x = X.clone().requires_grad_()
            with scope:
                out = call(x).float().sum()
            (slope,) = torch.autograd.grad(out, x, create_graph=True)
            (out + slope.square().sum()).backward()
        for ours, theirs in zip(amp.parameters(), model.parameters(), strict=True):
            assert equal(ours.grad, theirs.grad)
