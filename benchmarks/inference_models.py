"""The models that ``inference.py`` measures, each with the arguments of one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["MODELS", "Case", "make"]


@dataclass(frozen=True)
class Case:
    """A model in evaluation mode, in float32, and the arguments of one call, which autocast gets too."""

    model: nn.Module
    args: tuple[Tensor, ...]
    cached: frozenset[int] = frozenset()
    """Which arguments an earlier call gave, so that they have the dtype that the contender computes in."""


class SmallOperators(nn.Module):
    """Forty tiny linears, each with a few pointwise operators around it."""

    def __init__(self, width: int = 16, layers: int = 40) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            x = torch.tanh(y * 0.5 + 0.1).mul(2).sub(0.5) + x
        return x


class Block(nn.Module):
    """A pre-norm transformer block with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    """A decoder with learned positions and a head of its own; sixteen words a dimension."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        words = 16 * width
        self.embed, self.positions = nn.Embedding(words, width), nn.Embedding(1024, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LlamaBlock(nn.Module):
    """RMSNorm, rotary positions, keys and values for a quarter of the heads, a gated MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, width // 4, bias=False) for _ in range(2))
        hidden = width * 8 // 3 // 64 * 64
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], keys: Tensor, values: Tensor) -> Any:
        y = self.norm_1(x)
        q, k, v = (self._heads(each(y)) for each in (self.q, self.k, self.v))
        keys, values = torch.cat([keys, _turned(k, turn)], 2), torch.cat([values, v], 2)
        attended = functional.scaled_dot_product_attention(_turned(q, turn), keys, values, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        y = self.norm_2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y)), keys, values

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, self.size)).transpose(1, 2)


def _turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    cosine, sine = (each.to(x.dtype) for each in turn)
    one, other = x.chunk(2, -1)
    return x * cosine + torch.cat([-other, one], -1) * sine


class Llama(nn.Module):
    """A Llama-shaped stack that decodes one token, given the keys and values of those before."""

    frequencies: Tensor

    def __init__(self, width: int = 512, layers: int = 8, heads: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(8 * width, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 8 * width, bias=False)
        size = width // heads
        self.register_buffer("frequencies", 10000.0 ** -(torch.arange(0, size, 2) / size))

    def forward(self, tokens: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """*keys*, *values*: layers, batch, heads, tokens before, size of a head."""
        position = torch.tensor([float(keys.shape[3])])
        angles = torch.cat([position[:, None] * self.frequencies] * 2, -1)
        turn = angles.cos(), angles.sin()
        x, now = self.embed(tokens), []
        for block, k, v in zip(self.blocks, keys.unbind(0), values.unbind(0), strict=True):
            x, k, v = block(x, turn, k, v)  # noqa: PLW2901
            now.append((k, v))
        return self.head(self.norm(x)), *(torch.stack(each) for each in zip(*now, strict=True))


class ViT(nn.Module):
    """A vision transformer on patches of 16 by 16."""

    def __init__(self, width: int = 192, layers: int = 6, heads: int = 3, size: int = 112) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.positions = nn.Parameter(torch.randn(1, (size // 16) ** 2, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads, causal=False) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.mean(1)))


class UnrolledLSTM(nn.Module):
    """An LSTM cell in a loop over time."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.input, self.state = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        """*x*: batch, time, width."""
        h = c = x.new_zeros(x.shape[0], x.shape[2])
        for step in x.unbind(1):
            i, f, g, o = (self.input(step) + self.state(h)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
        return h


class UNet(nn.Module):
    """Three levels, two convolutions a level each way, joined across."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(map(_level, [3, *widths[:-1]], widths))
        self.up = nn.ModuleList(_level(a + b, a) for a, b in pairwise(widths))
        self.last = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        levels = []
        for level in self.down:
            x = level(x if not levels else functional.max_pool2d(x, 2))
            levels.append(x)
        for level, across in zip(reversed(self.up), reversed(levels[:-1]), strict=True):
            x = level(torch.cat([functional.interpolate(x, scale_factor=2.0), across], 1))
        return self.last(x)


def _level(before: int, after: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (before, after):
        layers += [nn.Conv2d(channels, after, 3, padding=1), nn.GroupNorm(4, after), nn.SiLU()]
    return nn.Sequential(*layers)


def _mlp(*widths: int) -> nn.Module:
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def _gpt(width: int, layers: int, heads: int, batch: int, length: int) -> Case:
    return Case(GPT(width, layers, heads), (torch.randint(0, 16 * width, (batch, length)),))


def _llama() -> Case:
    model = Llama()
    cache = torch.randn(8, 1, 2, 128, 64), torch.randn(8, 1, 2, 128, 64)
    return Case(model, (torch.randint(0, 4096, (1, 1)), *cache), frozenset({1, 2}))


def _vision(name: str, batch: int, size: int, **options: Any) -> Case:
    import torchvision  # noqa: PLC0415

    return Case(getattr(torchvision.models, name)(**options), (torch.randn(batch, 3, size, size),))


MODELS: dict[str, Callable[[], Case]] = {
    "mlp 64-256x4 b1": lambda: Case(_mlp(64, 256, 256, 256, 256, 64), (torch.randn(1, 64),)),
    "mlp 64-256x4 b64": lambda: Case(_mlp(64, 256, 256, 256, 256, 64), (torch.randn(64, 64),)),
    "mlp 1024-2048x4 b64": lambda: Case(_mlp(1024, 2048, 2048, 2048, 2048, 1024), (torch.randn(64, 1024),)),
    "small operators": lambda: Case(SmallOperators(), (torch.randn(4, 16),)),
    "gpt 64x4 b1t1": lambda: _gpt(64, 4, 4, 1, 1),
    "gpt 64x4 b8t128": lambda: _gpt(64, 4, 4, 8, 128),
    "gpt 256x6 b1t1": lambda: _gpt(256, 6, 8, 1, 1),
    "gpt 256x6 b8t128": lambda: _gpt(256, 6, 8, 8, 128),
    "gpt 768x12 b1t1": lambda: _gpt(768, 12, 12, 1, 1),
    "gpt 768x12 b8t128": lambda: _gpt(768, 12, 12, 8, 128),
    "llama 512x8 b1 cache 128": _llama,
    "vit 192x6 b4": lambda: Case(ViT(), (torch.randn(4, 3, 112, 112),)),
    "vit_b_16 b1": lambda: _vision("vit_b_16", 1, 224),
    "lstm 128 unrolled b8t32": lambda: Case(UnrolledLSTM(), (torch.randn(8, 32, 128),)),
    "resnet18 b1": lambda: _vision("resnet18", 1, 128),
    "resnet50 b1": lambda: _vision("resnet50", 1, 128),
    "unet 16x3 b1": lambda: Case(UNet(), (torch.randn(1, 3, 64, 64),)),
}


def make(name: str) -> Case:
    """The case called *name*, with the same weights each time."""
    torch.manual_seed(0)
    case = MODELS[name]()
    case.model.eval()
    return case
