"""A packed weight and its proof: the layout that oneDNN multiplies by, used where it is right and pays.

oneDNN brings a weight into a layout of its own whenever it multiplies by it.  Made once, in advance, that
saves most of the time of a linear layer with few rows.  The kernel may differ from the plain one, so there
is one rule: a packed weight is used only for a kind of call of which a check has shown, on this machine,

* the *same bits* as the plain call gives: on the call's own input and on random ones of its very sizes and
  strides (of usual size, large, small, subnormal, of mixed magnitude, with zeros of both signs), and
* a *gain* in time, the median of interleaved runs, by more than a margin.

Else the plain call stays, and the verdict says why.  The operators are private to PyTorch
(``torch.ops.mkldnn``), so they are fields of :class:`Packing`, and one that fails is a verdict, too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from fxamp.errors import ArgumentError

__all__ = ["Packing", "Verdict", "inputs_like", "median_ratio", "packing_of", "prove", "same_bits"]

_INTEGERS = {2: torch.int16, 4: torch.int32}


def _pack(weight: torch.Tensor, rows: int) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return packed


def _linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
    return result


def median_ratio(plain: Callable[[], object], other: Callable[[], object]) -> float:
    """How long *other* takes, relative to *plain*: the median over eleven rounds of both, in turn."""
    start = time.perf_counter()
    plain(), other()
    calls = max(1, int(2e-4 / max(time.perf_counter() - start, 1e-7)))
    ratios = []
    for index in range(11):
        seconds = {}
        for call in (plain, other) if index % 2 else (other, plain):
            start = time.perf_counter()
            for _ in range(calls):
                call()
            seconds[call] = time.perf_counter() - start
        ratios.append(seconds[other] / max(seconds[plain], 1e-9))
    return statistics.median(ratios)


@dataclass(frozen=True)
class Packing:
    """Which weights of a frozen module are packed, and how.

    A packed weight takes as many bytes as the rounded one, and is kept beside it, since calls with other
    numbers of rows, ``state_dict``, ``export`` and ``torch.compile`` read the plain one.

    Attributes:
        smallest: Elements of the smallest weight that is tried; below, starting the operator costs more.
        layouts: How many packed copies are kept of a weight; one is for one number of rows.
        kinds: How many kinds of calls (sizes, strides, threads) of a weight are tried.
        margin: The part of the plain time that must be saved.
        pack: ``pack(weight, rows)`` packs a weight of shape ``(outputs, inputs)``.
        linear: ``linear(x, packed, bias)`` multiplies by it.
        ratio: ``ratio(plain, other)`` is the time of *other* relative to that of *plain*.

    Raises:
        ArgumentError: A field is out of its range.
    """

    smallest: int = 2**14
    layouts: int = 2
    kinds: int = 8
    margin: float = 0.1
    pack: Callable[[torch.Tensor, int], torch.Tensor] = _pack
    linear: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor] = _linear
    ratio: Callable[[Callable[[], object], Callable[[], object]], float] = median_ratio

    def __post_init__(self) -> None:
        if self.smallest < 1 or self.layouts < 1 or self.kinds < 1 or not 0 <= self.margin < 1:
            raise ArgumentError(
                "smallest, layouts and kinds are at least 1 and margin is in [0, 1), not "
                f"{self.smallest}, {self.layouts}, {self.kinds} and {self.margin}"
            )

    def refusal(self, dtype: torch.dtype) -> str:
        """Why weights of *dtype* cannot be packed on this CPU; ``""`` if they can."""
        try:
            weight = torch.ones(16, 16, dtype=dtype)
            self.linear(weight, self.pack(weight, 16), None)
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            return f"not on this CPU: {str(error).splitlines()[0]}"
        return ""


def packing_of(prepack: str | Packing) -> Packing | None:
    """What the argument of ``freeze`` means; ``None`` for no packed weights.

    Raises:
        ArgumentError: It means nothing.
    """
    if isinstance(prepack, Packing):
        return prepack
    if prepack not in ("off", "auto"):
        raise ArgumentError(
            f"prepack is 'off', 'auto' or a Packing, not {prepack!r}\n  see help(fxamp.freeze)"
        )
    return Packing() if prepack == "auto" else None


@dataclass(frozen=True)
class Verdict:
    """What the check of one kind of call has shown.

    Attributes:
        packed: The packed weight; ``None`` if such calls stay plain.
        why: For people.
        version: That of the weight.
        shape: The sizes of the input.
        stride: Its strides.
    """

    packed: torch.Tensor | None
    why: str
    version: int = -1
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()


def prove(
    packing: Packing,
    packed: torch.Tensor,
    x: torch.Tensor,
    plain: Callable[[torch.Tensor], torch.Tensor],
    other: Callable[[torch.Tensor], torch.Tensor],
) -> Verdict:
    """Compare a linear layer by a packed weight with the plain one.

    Args:
        packing: The margin, and how time is measured.
        packed: The packed weight.
        x: The input of a call, ``(*, inputs)``.
        plain: The plain call, of an input like *x*.
        other: The call that reads *packed*.
    """
    try:
        for kind, sample in inputs_like(x):
            if not same_bits(plain(sample), other(sample)):
                return Verdict(None, f"other bits for {kind}")
    except RuntimeError as error:
        return Verdict(None, f"it fails: {str(error).splitlines()[0]}")
    ratio = packing.ratio(lambda: plain(x), lambda: other(x))
    if ratio > 1 - packing.margin:
        return Verdict(None, f"the same bits but no gain: {ratio:.2f} of the plain time")
    return Verdict(packed, f"the same bits in {ratio:.2f} of the plain time")


def inputs_like(x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """*x* and random tensors of its dtype, sizes and strides, each with what kind of numbers it has."""
    limits, generator = torch.finfo(x.dtype), torch.Generator().manual_seed(0)
    normal = torch.randn(x.shape, generator=generator)
    exponents = torch.empty(x.shape).uniform_(-0.5, 0.5, generator=generator)
    spread = 2.0 ** (exponents * torch.tensor(limits.max).log2())
    kinds = {
        "numbers of usual size": normal,
        "large numbers": normal * limits.max**0.5,
        "small numbers": normal * limits.tiny**0.5,
        "zeros of both signs": torch.where(exponents > 0, normal, normal * 0),
        "subnormal numbers": normal * limits.tiny,
        "numbers of mixed magnitude": normal * spread,
    }
    yield "the input of the call", x
    for kind, values in kinds.items():
        yield kind, torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(values)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, sizes, strides and bits; any NaN is like any other."""
    if (one.dtype, one.shape, one.stride()) != (other.dtype, other.shape, other.stride()):
        return False
    integer = _INTEGERS[one.element_size()]
    same = one.view(integer) == other.view(integer)
    return bool((same | (one.isnan() & other.isnan())).all())
