"""How many casts and operators an inference call is left with; counted as the dispatcher sees them.

Casts of weights are not counted, since freezing removes them.  The bounds are what eager autocast's semantics
leave: one cast for each float32 activation that an operator in low precision reads.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import fxamp
from tests.counts import Counts
from tests.models import equal


class Attention(nn.Module):
    """Self-attention whose queries, keys and values come from one projection or from three."""

    def __init__(self, width: int, heads: int, *, causal: bool, fused: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.inputs = nn.ModuleList(
            [nn.Linear(width, 3 * width)] if fused else [nn.Linear(width, width) for _ in range(3)]
        )
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """A tensor like *x*, ``[batch, length, width]``."""
        parts = [each(x) for each in self.inputs]
        found = parts if len(parts) > 1 else parts[0].chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in found)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """One layer, normalised first."""

    def __init__(self, width: int, heads: int, *, causal: bool, fused: bool) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=causal, fused=fused)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """A tensor like *x*, ``[batch, length, width]``."""
        x = x + self.attention(self.norm_1(x))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return out


class GPT(nn.Module):
    """Twelve layers with the structure of GPT-2, narrower."""

    def __init__(self, words: int = 64, width: int = 64, blocks: int = 12) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width, 4, causal=True, fused=False) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Scores ``[batch, length, words]`` of *tokens* at *places*."""
        x = self.words(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


class ViT(nn.Module):
    """Six layers of ViT."""

    def __init__(self, width: int = 64, blocks: int = 6) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.first = nn.Parameter(torch.randn(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, 17, width))
        self.blocks = nn.ModuleList(Block(width, 4, causal=False, fused=True) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Scores ``[batch, 10]`` of *images* ``[batch, 3, 32, 32]``."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.places
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x)[:, 0])
        return scores


class UnrolledLSTM(nn.Module):
    """A cell that Python runs over 32 steps of a sequence, time first or batch first."""

    def __init__(self, width: int = 32, time: int = 0) -> None:
        super().__init__()
        self.width, self.time = width, time
        self.x, self.h = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width, bias=False)
        self.head = nn.Linear(width, 10)

    def forward(self, sequence: Tensor) -> Tensor:
        """Scores ``[batch, 10]`` of *sequence* ``[32, batch, width]``."""
        h = c = sequence.new_zeros(sequence.shape[1 - self.time], self.width)
        for step in sequence.unbind(self.time):
            i, f, g, o = (self.x(step) + self.h(h)).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        scores: Tensor = self.head(h)
        return scores


class Residual(nn.Module):
    """Two convolutions, and the input added to them."""

    def __init__(self, width: int, wider: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(width, wider, 3, stride, 1, bias=False)
        self.conv_2 = nn.Conv2d(wider, wider, 3, 1, 1, bias=False)
        self.norm_1, self.norm_2 = nn.BatchNorm2d(wider), nn.BatchNorm2d(wider)
        self.shortcut = nn.Sequential()
        if stride > 1:
            self.shortcut.append(nn.Conv2d(width, wider, 1, stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(wider))

    def forward(self, x: Tensor) -> Tensor:
        """A tensor ``[batch, wider, height / stride, width / stride]``."""
        h: Tensor = self.norm_1(self.conv_1(x)).relu_()
        h = self.norm_2(self.conv_2(h))
        h += self.shortcut(x)
        return h.relu_()


def resnet18() -> nn.Module:
    """The structure of torchvision's, narrower."""
    widths = [
        (8, 8, 1),
        (8, 8, 1),
        (8, 16, 2),
        (16, 16, 1),
        (16, 32, 2),
        (32, 32, 1),
        (32, 64, 2),
        (64, 64, 1),
    ]
    stem = [nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
    pool = [nn.MaxPool2d(3, 2, 1), *(Residual(*width) for width in widths), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*stem, *pool, nn.Flatten(), nn.Linear(64, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...], int, int]] = {
    "GPT": (GPT, (torch.randint(0, 64, (2, 8)), torch.arange(8)), 25, 174),
    "ViT": (ViT, (torch.randn(2, 3, 32, 32),), 15, 80),
    "unrolled LSTM": (UnrolledLSTM, (torch.randn(32, 4, 32),), 34, 423),
    "unrolled LSTM, batch first": (lambda: UnrolledLSTM(time=1), (torch.randn(4, 32, 32),), 34, 424),
    "resnet18": (resnet18, (torch.randn(1, 3, 32, 32),), 1, 89),
}


def _count(model: nn.Module, call: Callable[[], Tensor]) -> tuple[Tensor, Counts]:
    with Counts(model.parameters()) as counts:
        result = call()
    return result, counts


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("name", MODELS)
def test_an_inference_call_makes_as_many_casts_as_its_bound(
    name: str, mode: Callable[[], AbstractContextManager[object]]
) -> None:
    make, args, casts, operators = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    amp = fxamp.convert(model, dtype=torch.bfloat16)
    with mode():
        amp(*args)
        found, ours = _count(model, lambda: amp(*args))
        with torch.autocast("cpu", torch.bfloat16):
            expected, eager = _count(model, lambda: model(*args))
    assert equal(found, expected)
    assert ours.casts - ours.weight_casts == casts
    assert ours.casts <= eager.casts
    assert ours.operators - ours.weight_casts <= operators
    cost = amp.cost().mixed
    assert (cost.casts, cost.weight_casts) == (ours.casts, ours.weight_casts)
