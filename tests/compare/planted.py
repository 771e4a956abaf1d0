"""The planted faults and the right answers.

A case gives the model, its inputs, how it is compared, the operator that is at fault (by a piece of its
source line, its module or its name) and the kinds that are right answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fxamp.compare import Kind
from tests.compare.faulty_models import (
    BoxDecoder,
    ConvNorm,
    ConvStage,
    Durations,
    GatedFeedForward,
    Histogram,
    LargeLogits,
    MaskedByAddition,
    MaskedByConstant,
    NaiveSoftmax,
    OnePassVariance,
    Rotary,
    RunningSum,
    Segmenter,
    Similarity,
    SmallLoss,
    UnitVectors,
    Variational,
)

__all__ = ["FAULTS", "Fault"]

F16, BF16 = torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    Attributes:
        make: Gives the model and its inputs.
        dtype: The low precision dtype.
        source: A piece of the source line, or of the module path, of the operator at fault.
        op: A piece of its name.
        kinds: The kinds that are right.
        options: Further arguments of ``compare``.
    """

    make: Callable[[], tuple[Any, Any]]
    dtype: torch.dtype
    source: str
    op: str
    kinds: tuple[Kind, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


def _seeded(make: Callable[[], tuple[Any, Any]]) -> Callable[[], tuple[Any, Any]]:
    def seeded() -> tuple[Any, Any]:
        torch.manual_seed(0)
        return make()

    return seeded


def _loader_with_inf() -> tuple[Any, Any]:
    batches = [(torch.randn(2, 3, 8, 8),) for _ in range(6)]
    batches[3][0][1, 2, 4, 4] = math.inf
    return ConvNorm().eval(), batches


def _poisoned() -> tuple[Any, Any]:
    model = ConvNorm()
    with torch.no_grad():
        model(torch.full((2, 3, 8, 8), 3e38) * torch.randn(2, 3, 8, 8).sign())
    return model.eval(), (torch.randn(2, 3, 8, 8),)


def _poisoning() -> tuple[Any, Any]:
    batches = [(torch.randn(2, 3, 8, 8),) for _ in range(4)]
    batches[2][0].mul_(1e5)
    return ConvNorm().train(), batches


def _durations() -> tuple[Any, Any]:
    return Durations(), (torch.randn(1, 100_000, 4),)


def _with_zero_row() -> tuple[Any, Any]:
    x = torch.randn(4, 8)
    x[1] = 0
    return UnitVectors(), (x,)


def _drop(size: int) -> Tensor:
    return torch.ones(size, size).triu(1).bool()


_TINY = {"backward": True, "loss": lambda out: out.float().mean() * 1e-7}

FAULTS = {
    "gated feed-forward": Fault(
        _seeded(lambda: (GatedFeedForward(), torch.randn(4, 16))), F16, "wo", "linear", (Kind.OVERFLOW,)
    ),
    "squares in a hand-written norm": Fault(
        _seeded(lambda: (ConvStage(), torch.randn(2, 3, 8, 8))), F16, ".pow(2)", "pow", (Kind.OVERFLOW,)
    ),
    "masked_fill of -1e9": Fault(
        _seeded(lambda: (MaskedByConstant(), (torch.randn(1, 6, 16), _drop(6)))),
        F16,
        "-1e9",
        "masked_fill",
        (Kind.RAISES, Kind.CONSTANT),
    ),
    "additive mask of -1e9": Fault(
        _seeded(lambda: (MaskedByAddition(), (torch.randn(1, 6, 16), (~_drop(6)).float()))),
        F16,
        "-1e9",
        "to",
        (Kind.CONSTANT,),
    ),
    "eps of 1e-12": Fault(_seeded(_with_zero_row), F16, "1e-12", "add", (Kind.VANISHED,)),
    "cumsum of 100,000, bfloat16": Fault(_seeded(_durations), BF16, "cumsum", "cumsum", (Kind.STALLED,)),
    "cumsum of 100,000, float16": Fault(
        _seeded(lambda: (Durations(3.0), torch.randn(1, 100000, 4))),
        F16,
        "cumsum",
        "cumsum",
        (Kind.OVERFLOW,),
    ),
    "softmax of large logits": Fault(
        _seeded(lambda: (LargeLogits(), torch.randn(1, 8, 16))), BF16, "softmax", "softmax", (Kind.AMPLIFIED,)
    ),
    "softmax by hand": Fault(
        _seeded(lambda: (NaiveSoftmax(), torch.randn(4, 8, 16))), F16, ".exp()", "exp", (Kind.OVERFLOW,)
    ),
    "dice sum": Fault(
        _seeded(lambda: (Segmenter(), (torch.randn(2, 3, 256, 256), torch.ones(2, 1, 256, 256)))),
        F16,
        "total =",
        "sum",
        (Kind.OVERFLOW,),
    ),
    "rotary positions": Fault(
        _seeded(lambda: (Rotary(), torch.randn(1, 600, 16))), BF16, "type_as", "type_as", (Kind.INTEGERS,)
    ),
    "gradients of a tiny loss": Fault(
        _seeded(lambda: (SmallLoss(), torch.randn(8, 16))),
        F16,
        "head",
        "linear",
        (Kind.GRADIENT_UNDERFLOW,),
        _TINY,
    ),
    "Inf in one input of a loader": Fault(_seeded(_loader_with_inf), F16, "conv", "", (Kind.BAD_INPUT,)),
    "poisoned statistics": Fault(_seeded(_poisoned), BF16, "norm", "batch_norm", (Kind.BAD_WEIGHT,)),
    "statistics being poisoned": Fault(_seeded(_poisoning), F16, "norm", "batch_norm", (Kind.BAD_STATE,)),
    "saturated index_add": Fault(
        _seeded(lambda: (Histogram(), (torch.randn(6000, 4), torch.randint(3, (6000,))))),
        BF16,
        "index_add",
        "index_add",
        (Kind.SATURATED,),
    ),
    "saturated running sum": Fault(
        _seeded(lambda: (RunningSum(), torch.randn(1500, 4))), BF16, "total + step", "add", (Kind.SATURATED,)
    ),
    "vanishing cosine similarity": Fault(
        _seeded(lambda: (Similarity(), (torch.randn(6, 16), torch.randn(6, 16)))),
        F16,
        "sqrt()",
        "",
        (Kind.UNDERFLOW, Kind.CONSTANT_OUTPUT),
    ),
    "exp in a box decoder": Fault(
        _seeded(lambda: (BoxDecoder(), (torch.randn(1, 8, 6, 6), torch.rand(36, 4) + 1))),
        F16,
        "exp(",
        "exp",
        (Kind.OVERFLOW,),
    ),
    "one-pass variance": Fault(
        _seeded(lambda: (OnePassVariance(), torch.randn(8, 16) * 0.1)),
        BF16,
        "variance: Tensor =",
        "sub",
        (Kind.CANCELLATION,),
    ),
    "log of a vanished exp": Fault(
        _seeded(lambda: (Variational(), torch.randn(4, 8))),
        F16,
        ".exp()",
        "exp",
        (Kind.VANISHED, Kind.UNDERFLOW),
    ),
}
