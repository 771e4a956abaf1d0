"""Tell from the numbers of one call what is wrong with it.

The detectors look at the result of the run, at what the operator makes of the reference's inputs (*alone*),
and at the reference's result.  What *alone* shows is the operator's own doing; what only the run shows came
in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from fxamp.compare.kinds import Finding, Kind
from fxamp.compare.rows import Count
from fxamp.compare.shadows import Shadow
from fxamp.compare.statistics import Tally
from fxamp.ir.scalars import overflows, scalar_arguments

__all__ = ["Call", "inspect", "inspect_source", "inspect_state"]

_LOOP = 8  # calls of one operator in one input, from which on it counts as a loop
_HALF = 0.5
_VARIES = 1e-3  # of the largest value: what counts as variation ...
_ULPS = 4  # ... and as more than rounding
_BIASED = 0.02  # share of a sum that is missing
_AMPLIFIED = 8.0  # roundings
_GROSS = 0.02  # noise over signal from which on the operator that fed it is to blame, too
_NEXT = 0.999  # what fed an operator is ranked next to it
_LONG = 64  # elements of a line that may stall


@dataclass(frozen=True)
class Call:
    """One call of an operator.

    Attributes:
        func: The operator.
        args: What it got.
        kwargs: Likewise.
        inputs: The tensors among that.
        sources: Their shadows, in the same order.
        input: Which input of the model it belongs to.
        order: Which operator it is, over all inputs.
    """

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[torch.Tensor]
    sources: list[Shadow]
    input: int
    order: int

    def finding(self, kind: Kind, detail: str) -> Finding:
        """A finding at this call."""
        return Finding(kind, detail, self.input, self.order)


def inspect(
    call: Call, count: Count, result: torch.Tensor, expected: torch.Tensor, run: Tally, alone: Tally | None
) -> None:
    """Note at *count* what is wrong with a result of *call*."""
    _not_finite(call, count, result, expected, run, alone)
    low = result.dtype.itemsize < 4
    _lost_updates(call, count, result, expected, run, alone)
    _sensitive(call, count, run, alone)
    if alone is None or not alone.count:
        return
    if alone.noise or alone.underflow:
        _finite_and_wrong(call, count, result, alone)
        _rounding(call, count, result, alone)
        if low:
            _integers(call, count, result, expected, run)
    if low:
        _stalled(call, count, result, expected)


def inspect_source(call: Call, count: Count, tensor: torch.Tensor, name: str) -> None:
    """Look at a tensor from outside: an input, a parameter, a buffer."""
    if tensor.numel() == 0 or tensor.layout is not torch.strided:
        return
    ends = torch.aminmax(tensor.detach())
    if math.isfinite(ends.min) and math.isfinite(ends.max):
        return
    nan, inf = int(torch.isnan(tensor).sum()), int(torch.isinf(tensor).sum())
    if not name and not nan and set(tensor[torch.isinf(tensor)].tolist()) == {-math.inf}:
        return  # a mask
    what = " and ".join(text for number, text in ((nan, f"{nan} NaN"), (inf, f"{inf} Inf")) if number)
    if name:
        count.find(call.finding(Kind.BAD_WEIGHT, f"{name} has {what}"))
    else:
        shape = "x".join(map(str, tensor.shape))
        count.find(call.finding(Kind.BAD_INPUT, f"input {call.input}: a tensor of {shape} has {what}"))


def inspect_state(call: Call, count: Count, tensor: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Look at a buffer that was written to."""
    if tensor.shape != expected.shape or not tensor.numel():
        return
    bad = int((~torch.isfinite(tensor)).sum())
    if bad:
        also = "" if torch.isfinite(expected).all() else ", in the reference too"
        detail = f"input {call.input} leaves {bad} of {tensor.numel()} elements of {name} not finite{also}"
        count.find(call.finding(Kind.BAD_STATE, detail))


# --- not finite -------------------------------------------------------------------------------------


def _not_finite(
    call: Call, count: Count, result: torch.Tensor, expected: torch.Tensor, run: Tally, alone: Tally | None
) -> None:
    came_in = any(source.bad for source in call.sources)
    made = run.bad and not came_in
    if run.reference_nan and not came_in and not _given_bad(call):
        text = f"{run.reference_nan} NaN in {expected.dtype.abbr} from inputs without any"
        count.find(call.finding(Kind.NOT_PRECISION, text))
    if not made and not (alone is not None and alone.bad):
        return
    tally = run if made else alone
    assert tally is not None
    divided = list(_vanished_inputs(call)) if made else []
    for source in divided:
        detail = f"values other than 0 become 0 in {_names(call)}; {call.func.name()} makes Inf or NaN of it"
        for row in {id(row): row for row in (source.vanished, source.producer) if row is not None}.values():
            row.find(call.finding(Kind.VANISHED, detail))
    limit = torch.finfo(result.dtype).max
    what = "NaN" if tally.nan else "Inf"
    share = f"{tally.bad} of {tally.count} elements are {what}"
    if divided:
        count.find(call.finding(Kind.VANISHED, f"{share}: an input that is not 0 has vanished"))
        return
    bad = ~torch.isfinite(result) & torch.isfinite(expected)
    sizes = expected[bad].abs() if made else expected.abs()
    largest = float(sizes.max()) if sizes.numel() else math.inf
    numbers = (number for _, number in scalar_arguments(call.func, call.args, call.kwargs))
    constant = next((number for number in numbers if overflows(number, result.dtype)), None)
    only = made and sizes.numel() > 0 and float(sizes.min()) == largest
    if constant is not None or (only and _moves_data(call, result)):
        number = constant if constant is not None else largest
        text = f"{number:g} does not fit in {result.dtype.abbr} (max {limit:g})"
        count.find(call.finding(Kind.CONSTANT, text))
        return
    count.find(
        call.finding(
            Kind.OVERFLOW, f"{share}; the reference reaches {largest:.3g}, {result.dtype.abbr} {limit:.3g}"
        )
    )


def _given_bad(call: Call) -> bool:
    """Whether a tensor from outside that is not finite went in (masks of -Inf do, and are fine)."""
    return any(
        source.foreign and tensor.is_floating_point() and not bool(torch.isfinite(tensor).all())
        for tensor, source in zip(call.inputs, call.sources, strict=True)
    )


def _vanished_inputs(call: Call) -> Iterator[Shadow]:
    """The inputs that are 0 somewhere, where the reference's are not."""
    for tensor, source in zip(call.inputs, call.sources, strict=True):
        comparable = tensor.is_floating_point() and tensor.shape == source.value.shape
        if comparable and bool(((tensor == 0) & (source.value != 0)).any()):
            yield source


def _names(call: Call) -> str:
    dtypes = dict.fromkeys(t.dtype.abbr for t in call.inputs if t.is_floating_point())
    return "/".join(dtypes)


def _moves_data(call: Call, result: torch.Tensor) -> bool:
    """Whether the operator only puts values elsewhere or rounds them, to judge by its inputs."""
    return any(
        source.value.is_floating_point() and float(source.value.abs().max()) > torch.finfo(result.dtype).max
        for source in call.sources
        if source.value.numel() and source.value.layout is torch.strided
    )


# --- finite, and wrong ------------------------------------------------------------------------------


def _finite_and_wrong(call: Call, count: Count, result: torch.Tensor, alone: Tally) -> None:
    name = result.dtype.abbr
    span, wanted = alone.low[1] - alone.low[0], alone.reference[1] - alone.reference[0]
    largest = max(abs(end) for end in alone.reference)
    varies = max(_VARIES, _ULPS * torch.finfo(result.dtype).eps) * largest
    if alone.count > 1 and span == 0 and wanted > varies > 0:
        text = (
            f"all {alone.count} elements are {alone.low[0]:g}; the reference goes from "
            f"{alone.reference[0]:.3g} to {alone.reference[1]:.3g}"
        )
        count.find(call.finding(Kind.CONSTANT_OUTPUT, text))
    lost = alone.underflow / alone.nonzero if alone.nonzero else 0.0
    if lost > _HALF:
        tiny = torch.finfo(result.dtype).smallest_normal
        text = f"{lost:.0%} of what is not 0 becomes 0 in {name} (smallest normal {tiny:.2g})"
        count.find(call.finding(Kind.UNDERFLOW, text))
    elif alone.subnormal > _HALF * alone.nonzero and alone.noise > torch.finfo(result.dtype).eps:
        text = (
            f"{alone.subnormal / alone.nonzero:.0%} of what is not 0 is subnormal in {name}: digits are lost"
        )
        count.find(call.finding(Kind.UNDERFLOW, text))
    elif alone.sums[1] and 1 - alone.sums[0] / alone.sums[1] > _BIASED and alone.noise > _BIASED:
        missing = 1 - alone.sums[0] / alone.sums[1]
        if _reduces(call, result):
            count.find(call.finding(Kind.SATURATED, f"{missing:.0%} of the sum is missing in {name}"))


def _reduces(call: Call, result: torch.Tensor) -> bool:
    """Whether several elements of the inputs end up in one of the result."""
    return call.func._schema.is_mutable or any(t.numel() > result.numel() for t in call.inputs)


def _drift(call: Call, count: Count, run: Tally, alone: Tally | None) -> None:
    """An accumulator that is written in place falls behind, although no single step does."""
    if count.calls < _LOOP or not run.sums[1] or alone is None or alone.noise > run.noise / _LOOP:
        return
    missing = 1 - run.sums[0] / run.sums[1]
    if missing > _BIASED:
        text = f"{missing:.0%} of the sum is missing after {count.calls} calls"
        count.refine(call.finding(Kind.SATURATED, text))


def _lost_updates(
    call: Call,
    count: Count,
    result: torch.Tensor,
    expected: torch.Tensor,
    run: Tally,
    alone: Tally | None,
) -> None:
    """An accumulator that stands still: its updates are less than half of its last place."""
    if result.dtype.itemsize >= 4 or not call.inputs or count.calls < 2:
        return
    before, source = call.inputs[0], call.sources[0]
    if before is result:
        _drift(call, count, run, alone)
        return
    if (
        before.dtype is not result.dtype
        or before.shape != result.shape
        or source.value.shape != expected.shape
    ):
        return
    moved = expected != source.value
    count.lost += int((moved & (result == before)).sum())
    count.updates += int(moved.sum())
    if count.calls >= _LOOP and count.lost > _HALF * count.updates > 0:
        share, name = count.lost / count.updates, result.dtype.abbr
        text = f"{share:.0%} of the updates in {count.calls} calls are lost in {name}"
        count.refine(call.finding(Kind.SATURATED, text))


def _integers(call: Call, count: Count, result: torch.Tensor, expected: torch.Tensor, run: Tally) -> None:
    digits = round(-math.log2(torch.finfo(result.dtype).eps)) + 1
    if max(map(abs, run.reference)) <= 2**digits or result.numel() < 2:
        return
    some = expected.detach().reshape(-1)[:: max(1, expected.numel() // 64)][:64]
    if not bool((some == some.round()).all()) or not bool((some != some[0]).any()):
        return
    whole = expected.detach()
    if bool((whole == whole.round()).all()) and bool((result != whole).any()):
        wrong = int((result != whole).sum())
        text = (
            f"{wrong} of {result.numel()} integers are rounded: {result.dtype.abbr} has {digits} bits, "
            f"exact up to {2**digits}"
        )
        count.find(call.finding(Kind.INTEGERS, text))


def _stalled(call: Call, count: Count, result: torch.Tensor, expected: torch.Tensor) -> None:
    """A result that grows along a dimension, and whose neighbours are equal."""
    if Kind.INTEGERS in count.findings or expected.shape != result.shape:
        return
    for dim, size in enumerate(result.shape):
        if size < _LONG:
            continue
        place = tuple(slice(None) if axis == dim else 0 for axis in range(result.dim()))
        line, wanted = result[place], expected[place]
        steps = wanted[1:] - wanted[:-1]
        if not (bool((steps > 0).all()) or bool((steps < 0).all())):
            continue
        stuck = float((line[1:] == line[:-1]).float().mean())
        if stuck > _HALF / 2:
            text = f"{stuck:.0%} of the steps along dimension {dim} are lost in {result.dtype.abbr}"
            count.find(call.finding(Kind.STALLED, text))
            return


# --- rounding ---------------------------------------------------------------------------------------


def _rounding(call: Call, count: Count, result: torch.Tensor, alone: Tally) -> None:
    lows = [t for t in call.inputs if t.is_floating_point() and t.dtype.itemsize < 4]
    dtype = result.dtype if result.dtype.itemsize < 4 else lows[0].dtype if lows else None
    if dtype is None or not alone.noise:
        return
    unit = torch.finfo(dtype).eps / 2
    if alone.noise < _AMPLIFIED * unit:
        return
    times = alone.noise / unit
    size = math.sqrt(alone.signal / alone.count)
    largest = max((_size(source.value) for source in call.sources), default=0.0)
    kind = Kind.CANCELLATION if largest > _AMPLIFIED * size and _is_linear(call) else Kind.AMPLIFIED
    count.find(call.finding(kind, f"the rounding of {dtype.abbr} is amplified {times:.0f} times"))
    if alone.noise > _GROSS:
        for tensor, source in zip(call.inputs, call.sources, strict=True):
            if source.producer is not None and tensor.is_floating_point() and tensor.dtype.itemsize < 4:
                text = f"{call.func.name()} makes {alone.noise:.0%} noise of its rounding"
                source.producer.find(call.finding(Kind.TOO_COARSE, text))
                source.producer.blame = max(source.producer.blame, _NEXT * alone.noise)


def _sensitive(call: Call, count: Count, run: Tally, alone: Tally | None) -> None:
    """An operator that makes much of the small errors that come in, whatever dtype it computes in."""
    came_in = max((source.noise for source in call.sources), default=0.0)
    if not came_in or run.bad or run.noise < max(_GROSS, _AMPLIFIED * came_in):
        return
    if alone is not None and alone.noise > run.noise / 2:
        return  # its own rounding does it
    count.blame = max(count.blame, run.noise)
    text = f"an error of {came_in:.1e} that comes in is {run.noise:.0%} of what goes out"
    count.find(call.finding(Kind.AMPLIFIED, text))
    for source in call.sources:
        if source.producer is not None and source.noise * 2 > came_in:
            text = f"{call.func.name()} makes {run.noise:.0%} noise of its error"
            source.producer.find(call.finding(Kind.TOO_COARSE, text))
            source.producer.blame = max(source.producer.blame, _NEXT * run.noise)


def _size(value: torch.Tensor) -> float:
    """Root mean square."""
    if not value.is_floating_point() or not value.numel() or value.layout is not torch.strided:
        return 0.0
    return float(torch.linalg.vector_norm(value.detach())) / math.sqrt(value.numel())


def _is_linear(call: Call) -> bool:
    """Whether the operator adds or subtracts its inputs, so that large ones can cancel."""
    name = call.func._schema.name.split("::")[-1].rstrip("_")
    return name in ("add", "sub", "rsub", "lerp", "sum", "mean", "diff", "addcmul", "addcdiv")
