"""Models that Dynamo takes apart in one way or another; nearly all take ``(6, 6)`` values."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

__all__ = [
    "Branching",
    "Broken",
    "ChannelsLast",
    "Checkpointed",
    "EagerBetween",
    "InnerRegions",
    "Layer",
    "Mapped",
    "NoGrad",
    "OwnFunction",
    "ReentrantCheckpointed",
    "Tied",
]

BF16 = torch.bfloat16


class Layer(nn.Module):
    """One weight, for models that use it several times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.5)


class Broken(Layer):
    """A graph break with the weight used on both sides."""

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        h = self.layer(x).relu()
        torch._dynamo.graph_break()
        return self.layer(h.tanh()) + h  # type: ignore[no-any-return]


@torch._dynamo.disable  # type: ignore[untyped-decorator]
def in_python(layer: nn.Module, h: Tensor) -> Tensor:
    return layer(h).sin()  # type: ignore[no-any-return]


class EagerBetween(Layer):
    """Code that Dynamo leaves alone between two graphs, on the same weight."""

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        h = in_python(self.layer, self.layer(x).relu())
        return self.layer(h)  # type: ignore[no-any-return]


class ChannelsLast(nn.Module):
    """A weight whose memory is not in the order of its dimensions, on both sides of a break."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        h = self.conv(x)
        torch._dynamo.graph_break()
        return self.conv(h).relu()  # type: ignore[no-any-return]


class Tied(nn.Module):
    """Two layers, one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        return self.two(self.one(x).tanh())  # type: ignore[no-any-return]


class InnerRegions(Layer):
    """Regions of the model's own, one weight in all of them."""

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        with torch.autocast("cpu", dtype=BF16):
            h = self.layer(self.layer(x).tanh())
        with torch.autocast("cpu", enabled=False):
            h = self.layer(h.float())
        with torch.autocast("cpu", dtype=BF16):
            h = self.layer(self.layer(h).tanh())
        return self.layer(h.float()).sin()  # type: ignore[no-any-return]


class NoGrad(Layer):
    """A weight used first without gradients."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Run it."""
        with torch.no_grad():
            target = self.layer(x)
        return self.layer(x) - target, self.layer(target)


class Scaled(torch.autograd.Function):
    """A product with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """The product."""
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Twice the gradient of ``x``."""
        x, weight = ctx.saved_tensors
        return 2 * grads[0] @ weight.t().to(grads[0].dtype), x.t().to(grads[0].dtype) @ grads[0]


class OwnFunction(Layer):
    """An ``autograd.Function`` between layers."""

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        h = Scaled.apply(self.layer(x).relu(), self.layer.weight)
        return self.layer(h.relu()).sin()  # type: ignore[no-any-return]


class Checkpointed(Layer):
    """A block with dropout that is computed again in backward."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        h = self.layer(x).tanh()
        h = checkpoint(self.block, h, use_reentrant=self.reentrant)
        return self.layer(h).sin()  # type: ignore[no-any-return]

    def block(self, h: Tensor) -> Tensor:
        """What is checkpointed."""
        return self.drop(self.layer(self.drop(self.layer(h)).relu()))  # type: ignore[no-any-return]


class ReentrantCheckpointed(Checkpointed):
    """The same, with the other kind of checkpoint."""

    reentrant = True


class Branching(Layer):
    """A branch on a value."""

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        h = self.layer(x).tanh()
        h = torch.cond(h.sum() > 0, lambda y: self.layer(y).relu(), lambda y: self.layer(y).sin(), (h,))
        return self.layer(h).sin()  # type: ignore[no-any-return]


class Mapped(Layer):
    """A ``vmap`` over the rows."""

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        h = self.layer(x).tanh()
        h = torch.vmap(lambda row: functional.linear(row, self.layer.weight).relu())(h)
        return self.layer(h).sin()  # type: ignore[no-any-return]
