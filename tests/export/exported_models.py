"""Small models, each with something that an artifact must get right; and an operator of their own."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


@torch.library.custom_op("fxamp_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    """Twice *x*, in its dtype."""
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclasses.dataclass
class Scores:
    scores: Tensor
    hidden: Tensor
    name: str = "scores"


class Cache:
    def __init__(self, keys: Tensor) -> None:
        self.keys = keys
        self.length = 3


class Tied(nn.Module):
    """An embedding that is the head's weight, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Any:
        return self.head(self.embedding(ids))


class TwiceUsed(nn.Module):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.other = self.one

    def forward(self, x: Tensor) -> Any:
        return self.other(self.one(x).relu())


class Counting(nn.Module):
    """Writes to a buffer in every call."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        scores: Tensor = self.linear(x) * self.calls
        return scores


class Rebinding(nn.Module):
    """Puts a new tensor into a buffer in every call."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.linear(x).float()
        self.mean = self.mean * 0.5 + scores.mean(0)
        centred: Tensor = scores - self.mean
        return centred


class Keeping(nn.Module):
    """Keeps a tensor in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.last: Tensor | None = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.linear(x)
        return self.last + 1


class Structured(nn.Module):
    """Returns its tensors in a container of *kind*."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear, self.norm = nn.Linear(8, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Any:
        hidden = self.linear(x)
        scores = self.norm(hidden)
        kinds: dict[str, Any] = {
            "dict": {"scores": scores, "more": [hidden, 3]},
            "ordered": OrderedDict(scores=scores, hidden=hidden),
            "tuple": (scores, None, (hidden,)),
            "named": Pair(scores, hidden),
            "dataclass": Scores(scores, hidden),
            "object": (scores, Cache(hidden)),
        }
        return kinds[self.kind]


class Keywords(nn.Module):
    """Takes keyword arguments, a flag among them, and one that is not given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor, *, scale: Tensor, flag: bool = False, mask: Tensor | None = None) -> Any:
        scores = self.linear(x) * scale
        return scores if mask is None and flag else -scores


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        doubled_again: Tensor = doubled(self.linear(x))
        return doubled_again


class Conditional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        def yes(x: Tensor) -> Any:
            return self.one(x).relu()

        def no(x: Tensor) -> Any:
            return self.other(x) * 2

        chosen: Tensor = torch.cond(x.sum() > 0, yes, no, (x,))
        return chosen


class Wide(nn.Module):
    """Meets float64 and integers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor, wide: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x) + wide, torch.mm(wide.float(), counts.float())


class SizeDependent(nn.Module):
    """Decides by the size of the batch: above *limit*, or for one."""

    def __init__(self, limit: int | None) -> None:
        super().__init__()
        self.limit, self.linear = limit, nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        scores = self.linear(x)
        if x.shape[0] == 1 if self.limit is None else x.shape[0] > self.limit:
            return scores.relu()
        return scores * 2


class Reading(nn.Module):
    """Reads a value, but not for an exporter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        if not torch.compiler.is_exporting() and bool(mask.all()):
            return self.linear(x)
        return self.linear(x) * mask


class ReadingDifferently(Reading):
    """Whose other way is another one for a single row."""

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        scores = super().forward(x, mask)
        return scores.relu() if x.shape[0] == 1 and not torch.compiler.is_exporting() else scores


class FailingForExporters(Reading):
    """Whose other way does not work."""

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        if torch.compiler.is_exporting():
            raise ValueError("another mask is wanted")
        return super().forward(x, mask)


class FillsCache(nn.Module):
    """Keeps in its first call what later calls read, until its mode is set; counts its calls in a buffer."""

    seen: Tensor
    cache: dict[str, Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.bias = nn.Parameter(torch.randn(6))
        self.register_buffer("seen", torch.tensor(0))
        self.cache = {}

    def train(self, mode: bool = True) -> FillsCache:
        """Forgets what it has kept."""
        super().train(mode)
        self.cache = {}
        return self

    def forward(self, x: Tensor) -> Tensor:
        """``(rows, 4)``, from ``(rows, 8)``."""
        if str(x.device) not in self.cache:
            self.cache[str(x.device)] = self.bias[torch.tensor([1, 0, 5, 2])]
        self.seen += 1
        result: Tensor = self.linear(x) + self.cache[str(x.device)] + self.seen
        return result


class CountsCalls(nn.Module):
    """Does something else in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """``(rows, 4)``, from ``(rows, 8)``."""
        self.calls += 1
        result: Tensor = self.linear(x) * self.calls
        return result


def convolutional() -> nn.Module:
    """A convolution, a norm, a classifier."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 5),
    )  # fmt: skip


def attention() -> nn.Module:
    """Has a fast path of its own in evaluation mode."""
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
