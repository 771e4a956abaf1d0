"""Small models that several tests share, and the comparison that all of them make."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

import fxamp

__all__ = ["SmallCNN", "SmallTransformer", "assert_like_eager", "autocast", "equal", "run"]


def autocast(dtype: torch.dtype) -> torch.autocast:
    """A fresh region of eager autocast on the CPU."""
    return torch.autocast("cpu", dtype=dtype)


def equal(one: Tensor | None, other: Tensor | None) -> bool:
    """Same dtype, shape and bits; NaN equals NaN."""
    if one is None or other is None:
        return one is other
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bool(torch.equal(one, other) or ((one == other) | ((one != one) & (other != other))).all())


class SmallCNN(nn.Module):
    """Convolutions, BatchNorm, dropout, a residual and a head."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, classes)`` of images ``(batch, 3, height, width)``."""
        h: Tensor = self.stem(x)
        h = functional.relu(self.body(h) + h)
        logits: Tensor = self.head(self.drop(h.mean((2, 3))))
        return logits


class SmallTransformer(nn.Module):
    """Tied embedding and head, pre-norm attention, a buffer of positions."""

    positions: Tensor

    def __init__(self, words: int = 30, width: int = 16, heads: int = 2, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.register_buffer("positions", torch.randn(64, width) * 0.1)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 32, 0.1, norm_first=True, batch_first=True)
            for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        """Logits ``(batch, length, words)`` and the mean state ``(batch, width)`` of *tokens*."""
        h: Tensor = self.embed(tokens) * scale + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            h = block(h)
        h = self.norm(h)
        return {"logits": self.head(h), "mean": h.mean(1)}


def run(
    model: nn.Module, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], scope: Any
) -> dict[str, Any]:
    """Outputs, gradients and buffers of one call, and the random state after it."""
    torch.manual_seed(7)
    with scope:
        out = call(*args, **kwargs)
    outputs = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
    losses = [leaf.float().square().sum() for leaf in outputs if leaf.requires_grad]
    if losses:
        torch.stack(losses).sum().backward()
    return {
        "outputs": [leaf.detach().clone() for leaf in outputs],
        "gradients": {name: parameter.grad for name, parameter in model.named_parameters()},
        "inputs": [arg.grad for arg in args if isinstance(arg, Tensor)],
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
        "random": torch.get_rng_state(),
    }


def assert_like_eager(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    eager_modules: tuple[str, ...] = (),
) -> Any:
    """Convert a copy of *model*, compare one call with eager autocast, and give the converted model."""
    kwargs = kwargs or {}
    ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
    amp = fxamp.convert(ours, device_type="cpu", dtype=dtype)
    expected = run(theirs, theirs, _own(args), kwargs, autocast(dtype))
    found = run(ours, amp, _own(args), kwargs, nullcontext())
    for what in ("outputs", "inputs"):
        assert len(found[what]) == len(expected[what])
        for index, (one, other) in enumerate(zip(found[what], expected[what], strict=True)):
            assert equal(one, other), f"{what}[{index}] differ"
    for what in ("gradients", "buffers"):
        assert found[what].keys() == expected[what].keys()
        for name in found[what]:
            assert equal(found[what][name], expected[what][name]), f"{what} of {name} differ"
    assert torch.equal(found["random"], expected["random"]), "the random state differs"
    assert amp.eager_modules == eager_modules, [str(piece) for piece in amp.report().eager]
    return amp


def _own(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies of the tensors, so that neither run sees the other's gradients or writes."""

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.detach().clone().requires_grad_(value.requires_grad)

    return tuple(pytree.tree_map(copied, args))
