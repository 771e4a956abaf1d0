"""How far one tensor is from another: the candidate from its reference, counted in chunks.

A :class:`Tally` adds up over the calls of one operator; :meth:`Tally.read` gives the numbers.  Nothing larger
than a chunk is made, so comparing costs no memory that grows with the tensors.

====================  ==========================================================================
``max_abs``           largest error, over the elements that are finite on both sides
``max_rel``           largest error over the reference, which counts as the smallest normal number
                      of the candidate's dtype at least
``sqnr_db``           signal over quantisation noise, ``10 log10(sum r^2 / sum (c - r)^2)``
``ulps``              errors in units of the last place of the low precision dtype, as a histogram
``underflow`` ...     shares of all elements
====================  ==========================================================================
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

__all__ = ["ULP_BOUNDS", "Statistics", "Tally", "ordinal", "same_bits"]

ULP_BOUNDS = (0, 1, 2, 4, 16, 256)
"""Upper ends of the bins of the histogram; one more bin holds the rest."""

_CHUNK = 1 << 15  # elements: a dozen arrays of float32 fit into the second level of cache ...
_SMALL = 1 << 19  # ... and of smaller tensors half as many, so that those arrays stay small beside them
_SUMS = ("count", "error", "signal", "nan", "inf", "underflow", "subnormal", "nonzero", "reference_nan",
         "reference_inf")  # fmt: skip
_MAXIMA = ("max_abs", "max_rel", "largest")
_SQUARES_FIT = (1e-12, 1e15)  # between, the squares of a chunk are fine in float32


@dataclass(frozen=True)
class Statistics:
    """A candidate against its reference.

    Attributes:
        count: Elements compared.
        max_abs: Largest absolute error.
        max_rel: Largest relative error.
        sqnr_db: Signal to noise in dB, ``inf`` where all are equal.
        ulps: How many elements lie within each of ``ULP_BOUNDS``, then beyond all.
        nan: Share of the elements that are NaN where the reference is finite.
        inf: Share of the elements that are Inf where the reference is finite.
        underflow: Share of the elements that are 0 where the reference is not.
        subnormal: Share of the elements that are subnormal.
        magnitude: Largest finite absolute value.
        headroom: What the dtype's largest number is over ``magnitude``.
    """

    count: int
    max_abs: float
    max_rel: float
    sqnr_db: float
    ulps: tuple[int, ...]
    nan: float
    inf: float
    underflow: float
    subnormal: float
    magnitude: float
    headroom: float

    @property
    def noise(self) -> float:
        """The error's root mean square over that of the reference; 1 at most where anything is not finite."""
        if self.nan or self.inf:
            return math.inf
        return 0.0 if self.sqnr_db == math.inf else float(10 ** (-self.sqnr_db / 20))

    @property
    def max_ulp(self) -> int:
        """The upper end of the histogram's last bin that is not empty; -1 for the open one."""
        last = max((index for index, count in enumerate(self.ulps) if count), default=0)
        return ULP_BOUNDS[last] if last < len(ULP_BOUNDS) else -1


@dataclass
class Tally:
    """Adds up what :class:`Statistics` tells.

    Attributes:
        unit: The dtype in whose last places errors are counted; ``None`` for no histogram.
    """

    unit: torch.dtype | None = None
    count: int = 0
    error: float = 0.0
    signal: float = 0.0
    max_abs: float = 0.0
    max_rel: float = 0.0
    ulps: list[int] = field(default_factory=lambda: [0] * (len(ULP_BOUNDS) + 1))
    nan: int = 0
    inf: int = 0
    underflow: int = 0
    subnormal: int = 0
    nonzero: int = 0
    reference_nan: int = 0
    reference_inf: int = 0
    largest: float = 0.0
    low: tuple[float, float] = (math.inf, -math.inf)
    reference: tuple[float, float] = (math.inf, -math.inf)
    sums: tuple[float, float] = (0.0, 0.0)
    dtype: torch.dtype = torch.float32

    def add(self, candidate: torch.Tensor, reference: torch.Tensor, scale: float = 1.0) -> None:
        """Count two tensors of the same shape; *candidate* is *scale* times what it stands for."""
        self.dtype = candidate.dtype
        one, other = _flat(candidate.detach(), reference.detach())
        step = _CHUNK if one.numel() >= _SMALL else _CHUNK // 2
        for start in range(0, one.numel(), step):
            low, ref = one[start : start + step], other[start : start + step]
            self._chunk(low, ref, scale)

    def _chunk(self, low: torch.Tensor, ref: torch.Tensor, scale: float) -> None:
        self.count += low.numel()
        wide = torch.promote_types(ref.dtype, torch.float32)
        c, r = low.to(wide), ref.to(wide)
        if scale != 1.0:
            c = c / scale
        ends = [float(end) for pair in (torch.aminmax(c), torch.aminmax(r)) for end in pair]
        if not all(map(math.isfinite, ends)):
            c, r, ends = self._finite(c, r)
            if c.numel() == 0:
                return
        self.low = min(self.low[0], ends[0]), max(self.low[1], ends[1])
        self.reference = min(self.reference[0], ends[2]), max(self.reference[1], ends[3])
        self.largest = max(self.largest, abs(ends[0]) * scale, abs(ends[1]) * scale)
        if not _SQUARES_FIT[0] < max(map(abs, ends)) < _SQUARES_FIT[1]:
            c, r = c.double(), r.double()
        self._finite_chunk(c, r, low.dtype, scale)

    def _finite(self, c: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
        """Count what is not finite, and give the elements that are finite on both sides."""
        there, expected = torch.isfinite(c), torch.isfinite(r)
        nan = int((torch.isnan(c) & expected).sum())
        self.nan += nan
        self.inf += int((~there & expected).sum()) - nan
        reference_nan = int(torch.isnan(r).sum())
        self.reference_nan += reference_nan
        self.reference_inf += int((~expected).sum()) - reference_nan
        both = there & expected
        c, r = c[both], r[both]
        if c.numel() == 0:
            return c, r, []
        return c, r, [float(end) for pair in (torch.aminmax(c), torch.aminmax(r)) for end in pair]

    def _finite_chunk(self, c: torch.Tensor, r: torch.Tensor, dtype: torch.dtype, scale: float) -> None:
        tiny = torch.finfo(dtype).tiny / scale
        error, size, magnitude = (c - r).abs_(), r.abs(), c.abs()
        self.signal += float(torch.dot(r, r))
        largest = float(error.max())
        self.sums = self.sums[0] + float(magnitude.sum()), self.sums[1] + float(size.sum())
        nonzero, there = int(torch.count_nonzero(r)), int(torch.count_nonzero(c))
        self.nonzero += nonzero
        if there < c.numel() and largest:
            self.underflow += int(((c == 0) & (r != 0)).sum())
        if float(magnitude.min()) < tiny:
            self.subnormal += int(((magnitude < tiny) & (c != 0)).sum())
        if not largest:
            self.ulps[0] += c.numel() if self.unit is not None else 0
            return
        self.error += float(torch.dot(error, error)) or largest**2
        self.max_abs = max(self.max_abs, largest)
        self.max_rel = max(self.max_rel, float((error / size.clamp_min_(tiny)).max()))
        if self.unit is not None:
            self._count_ulps(c, r, self.unit)

    def _count_ulps(self, c: torch.Tensor, r: torch.Tensor, dtype: torch.dtype) -> None:
        steps = ordinal(c.to(dtype)).sub_(ordinal(r.to(dtype))).abs_()
        left = steps.numel()
        for index, bound in enumerate(ULP_BOUNDS):
            beyond = int(torch.count_nonzero(steps > bound))
            self.ulps[index] += left - beyond
            left = beyond
            if not left:
                return
        self.ulps[-1] += left

    def merge(self, other: Tally) -> None:
        """Count what *other* has counted."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in _MAXIMA:
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        self.ulps = [one + more for one, more in zip(self.ulps, other.ulps, strict=True)]
        self.low = min(self.low[0], other.low[0]), max(self.low[1], other.low[1])
        ends = self.reference, other.reference
        self.reference = min(ends[0][0], ends[1][0]), max(ends[0][1], ends[1][1])
        self.sums = self.sums[0] + other.sums[0], self.sums[1] + other.sums[1]
        self.dtype = other.dtype

    def read(self) -> Statistics:
        """The numbers so far."""
        count = max(self.count, 1)
        limit = torch.finfo(self.dtype).max if self.dtype.is_floating_point else math.inf
        if self.error == 0:
            sqnr = math.inf
        else:
            sqnr = -math.inf if self.signal == 0 else 10 * math.log10(self.signal / self.error)
        return Statistics(
            count=self.count,
            max_abs=self.max_abs,
            max_rel=self.max_rel,
            sqnr_db=sqnr,
            ulps=tuple(self.ulps),
            nan=self.nan / count,
            inf=self.inf / count,
            underflow=self.underflow / count,
            subnormal=self.subnormal / count,
            magnitude=self.largest,
            headroom=limit / self.largest if self.largest else math.inf,
        )

    # --- what the detectors ask ---------------------------------------------------------------------

    @property
    def noise(self) -> float:
        """Root mean square of the error over that of the reference, of the finite elements."""
        if not self.error:
            return 0.0
        return math.sqrt(self.error / self.signal) if self.signal else math.inf

    @property
    def bad(self) -> int:
        """Elements that are not finite where the reference is."""
        return self.nan + self.inf


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Same dtype, shape and bits; NaN equals NaN."""
    if one.dtype != other.dtype or one.shape != other.shape or one.layout != other.layout:
        return False
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    return bool(torch.equal(one, other) or ((one == other) | ((one != one) & (other != other))).all())


def _flat(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as vectors of real numbers in one order, without a copy where the layouts agree."""
    if one.is_complex():
        one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
    if not (one.is_contiguous() and other.is_contiguous()) and one.stride() == other.stride():
        order = sorted(range(one.dim()), key=one.stride().__getitem__, reverse=True)
        one, other = one.permute(order), other.permute(order)
    return one.reshape(-1), other.reshape(-1)


def ordinal(values: torch.Tensor) -> torch.Tensor:
    """Integers in the order of float16 or bfloat16 *values*, one apart where these are neighbours."""
    bits = values.view(torch.int16)
    sign = bits >> 15  # 0, or -1 where it is set
    return (bits ^ (sign & torch.iinfo(torch.int16).max)).sub_(sign).to(torch.int32)
