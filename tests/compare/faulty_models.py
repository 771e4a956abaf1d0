"""Small realistic models, each with one fault that only low precision brings out."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = [
    "Attention",
    "BoxDecoder",
    "ChannelsFirstNorm",
    "ConvNorm",
    "ConvStage",
    "Durations",
    "GatedFeedForward",
    "Histogram",
    "LargeLogits",
    "MaskedByAddition",
    "MaskedByConstant",
    "NaiveSoftmax",
    "OnePassVariance",
    "Rotary",
    "RunningSum",
    "Segmenter",
    "Similarity",
    "SmallLoss",
    "UnitVectors",
    "Variational",
]


class GatedFeedForward(nn.Module):
    """T5's feed-forward: the last projection leaves the range of float16."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wi_0, self.wi_1, self.wo = (nn.Linear(width, 4 * width, bias=False) for _ in range(3))
        self.wo = nn.Linear(4 * width, width, bias=False)
        self.head = nn.Linear(width, 4)
        with torch.no_grad():
            self.wi_0.weight.mul_(60), self.wi_1.weight.mul_(60), self.wo.weight.mul_(200)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(self.wi_0(x)) * self.wi_1(x)
        y: Tensor = self.head(self.norm(x + self.wo(hidden)))
        return y


class ChannelsFirstNorm(nn.Module):
    """ConvNeXt's layer norm for images, written by hand: squares of large values."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        spread = (x - mean).pow(2).mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(spread + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class ConvStage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.head = (
            nn.Conv2d(3, 8, 3, padding=1),
            ChannelsFirstNorm(),
            nn.Conv2d(8, 4, 1),
        )
        with torch.no_grad():
            self.stem.weight.mul_(500)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(self.stem(x)))
        return y


class Attention(nn.Module):
    """One head; the subclasses mask or scale the scores."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def scores(self, x: Tensor) -> Tensor:
        y: Tensor = self.q(x) @ self.k(x).transpose(-2, -1) / math.sqrt(x.shape[-1])
        return y

    def mix(self, weights: Tensor, x: Tensor) -> Tensor:
        y: Tensor = self.out(weights @ self.v(x))
        return y


class MaskedByConstant(Attention):
    def forward(self, x: Tensor, drop: Tensor) -> Tensor:
        scores = self.scores(x).masked_fill(drop, -1e9)
        return self.mix(scores.softmax(-1), x)


class MaskedByAddition(Attention):
    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        scores = self.scores(x)
        bias = ((1.0 - keep) * -1e9).to(scores.dtype)
        return self.mix((scores + bias).softmax(-1), x)


class LargeLogits(Attention):
    """Queries and keys without a norm, with a direction that all share: logits of hundreds, nearly alike."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(width)
        with torch.no_grad():
            self.q.bias.fill_(10.0), self.k.bias.fill_(10.0)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.scores(x)
        return self.mix(scores.softmax(-1), x)


class NaiveSoftmax(Attention):
    def forward(self, x: Tensor) -> Tensor:
        powers = (self.scores(x) * 30).exp()
        return self.mix(powers / powers.sum(-1, keepdim=True), x)


class UnitVectors(nn.Module):
    """Embeddings of length 1, with an eps that float16 does not have; one row is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(x)
        length = (y * y).sum(-1, keepdim=True).sqrt() + 1e-12
        unit: Tensor = y / length
        return unit


class Durations(nn.Module):
    """Start times of 100,000 frames, added up."""

    def __init__(self, length: float = 0.0) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 1)
        with torch.no_grad():
            self.gate.bias.fill_(length)

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.sigmoid(self.gate(x)).squeeze(-1)
        return torch.cumsum(steps, dim=1)


class Segmenter(nn.Module):
    """A dice loss over a whole map."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        likely = torch.sigmoid(self.head(torch.relu(self.encode(x))))
        both = (likely * target).sum()
        total = likely.sum() + target.to(likely.dtype).sum()
        return 1 - 2 * both / total


class Rotary(nn.Module):
    """Rotary positions in the dtype of the queries."""

    inverse: Tensor

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.project = nn.Linear(width, width)
        self.register_buffer("inverse", 1.0 / 10000 ** (torch.arange(0, width, 2) / width))

    def forward(self, x: Tensor) -> Tensor:
        q = self.project(x)
        positions = torch.arange(x.shape[1], device=x.device).type_as(q)
        angles = torch.outer(positions, self.inverse.to(q.dtype))
        cos, sin = angles.cos(), angles.sin()
        a, b = q[..., ::2], q[..., 1::2]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class SmallLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.tanh(self.body(x)))
        return y


class ConvNorm(nn.Module):
    """A convolution and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.relu(self.norm(self.conv(x))))
        return y


class Histogram(nn.Module):
    """The weight of each class, added up one by one in low precision."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        weights = torch.sigmoid(self.embed(x)).squeeze(-1)
        sums = weights.new_zeros(3)
        return sums.index_add(0, labels, weights)


class RunningSum(nn.Module):
    """A state that is updated step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.sigmoid(self.gate(x))
        total = steps[0] * 0
        for step in steps:
            total = total + step
        return total


class Similarity(nn.Module):
    """Cosine similarity of small features."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = self.project(x) * 1e-4, self.project(y) * 1e-4
        alike: Tensor = (a * b).sum(-1) / (a.pow(2).sum(-1).sqrt() * b.pow(2).sum(-1).sqrt()).clamp_min(1e-6)
        return alike


class BoxDecoder(nn.Module):
    """Box sizes as powers of what the head regresses."""

    def __init__(self) -> None:
        super().__init__()
        self.regress = nn.Conv2d(8, 4, 1)
        with torch.no_grad():
            self.regress.weight.mul_(12)

    def forward(self, x: Tensor, anchors: Tensor) -> Tensor:
        deltas = self.regress(x).flatten(2).transpose(1, 2)
        centers = anchors[:, :2] + deltas[..., :2] * anchors[:, 2:]
        sizes = torch.exp(deltas[..., 2:]) * anchors[:, 2:]
        return torch.cat([centers - sizes / 2, centers + sizes / 2], -1)


class OnePassVariance(nn.Module):
    """Var = E[x^2] - E[x]^2 of values with a large mean."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 32)
        with torch.no_grad():
            self.project.bias.fill_(20.0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(x)
        variance: Tensor = (y * y).mean(-1) - y.mean(-1) ** 2
        return variance


class Variational(nn.Module):
    """exp(log_var) and its logarithm again."""

    def __init__(self) -> None:
        super().__init__()
        self.log_var = nn.Linear(8, 4)
        with torch.no_grad():
            self.log_var.bias.fill_(-20.0)

    def forward(self, x: Tensor) -> Tensor:
        deviation = self.log_var(x).exp()
        return -torch.log(deviation)
