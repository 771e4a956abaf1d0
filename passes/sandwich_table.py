"""Which elementwise operators give in a low dtype what they give in float32, rounded; checked on the device.

A kernel for a half usually computes in float32 and rounds once, which is what ``op(x.float()).to(low)`` does;
whether it does is a matter of the device, the build and the vector units.  So nothing is taken on trust: a
row says only that an operator works on each element by itself, and before one is relied on, it is run on all
65,536 values of the low dtype, both ways, in long vectors, in rows too short for a vector, and with strides.

``python -m fxamp.passes.check_sandwiches`` runs the check for every row and prints what came of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from fxamp.ir.regions import no_autocast

__all__ = ["ELEMENTWISE", "Call", "is_elementwise", "is_exact", "is_exact_on_device", "rows"]

_ATEN = torch.ops.aten

_ALONE = """
    abs acos acosh asin asinh atan atanh ceil cos cosh digamma erf erfc erfinv exp exp2 expm1 floor frac
    hardsigmoid hardswish i0 lgamma log log10 log1p log2 log_sigmoid mish neg reciprocal relu relu6 round
    rsqrt selu sigmoid sign silu sin sinc sinh sqrt square tan tanh trunc
"""

# Operators on one tensor that treat each element by itself, with arguments to try: what is given after it.
ELEMENTWISE: Mapping[str, tuple[tuple[Any, ...], ...]] = MappingProxyType(
    {
        **dict.fromkeys(_ALONE.split(), ((),)),
        "gelu": ((), ("none",), ("tanh",)),  # by name, see _KEYWORDS
        "celu": ((), (0.5,)),
        "clamp": ((-1, 1), (0.1, 0.7)),
        "clamp_max": ((4,),),
        "clamp_min": ((0,), (1e-5,)),
        "elu": ((), (0.5,)),
        "hardshrink": ((),),
        "hardtanh": ((), (-2, 2)),
        "leaky_relu": ((), (0.2,)),
        "nan_to_num": ((0.0,),),
        "softplus": ((), (2, 10)),
        "softshrink": ((),),
        "threshold": ((0.5, 0.0),),
        "add.Tensor": ((1,), (0.1,)),
        "sub.Tensor": ((1,), (0.1,)),
        "mul.Tensor": ((2,), (0.1,)),
        "div.Tensor": ((2,), (3,)),
        "rsub.Scalar": ((1,), (0.1,)),
        "pow.Tensor_Scalar": ((2,), (3,), (0.5,), (1.7,)),
    }
)

_KEYWORDS = MappingProxyType({"gelu": "approximate"})


@dataclass(frozen=True)
class Call:
    """An operator and what it gets besides its tensor.

    Attributes:
        target: The operator; its first argument is the tensor.
        args: Its further arguments: numbers, strings, ``None``.
        kwargs: Likewise, by name.
    """

    target: OpOverload
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The result for *x*."""
        result: torch.Tensor = self.target(x, *self.args, **dict(self.kwargs))
        return result

    def __str__(self) -> str:
        given = [*map(repr, self.args), *(f"{key}={value!r}" for key, value in self.kwargs)]
        return f"{self.target.name().removeprefix('aten::')}({', '.join(['x', *given])})"


def rows() -> Iterator[Call]:
    """Every row of the table with each of its arguments."""
    for name, samples in ELEMENTWISE.items():
        packet, _, overload = name.partition(".")
        target = getattr(getattr(_ATEN, packet), overload or "default")
        for args in samples:
            keyword = _KEYWORDS.get(name)
            yield Call(target, (), ((keyword, *args),)) if keyword and args else Call(target, args)


def is_elementwise(target: object) -> bool:
    """Whether *target* is in the table."""
    return (
        isinstance(target, OpOverload)
        and target.namespace == "aten"
        and target.name().removeprefix("aten::") in ELEMENTWISE
    )


@cache
def is_exact_on_device(call: Call, low: torch.dtype, device: torch.device) -> bool:
    """Whether ``call(x)`` is ``call(x.float()).to(low)`` for every *x* of *low* on *device*, to the bit.

    Asked once for each in a process.  Where the device is not there, it is not known to be.
    """
    try:
        with _disable_current_modes(), torch.no_grad(), no_autocast():
            return is_exact(call, low, device)
    except Exception:  # noqa: BLE001  no such device, no such kernel: then there is nothing to rely on
        return False


def is_exact(call: Call, low: torch.dtype, device: torch.device) -> bool:
    """The check itself; see :func:`is_exact_on_device`."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(low).to(device)
    return all(_same(call(x), call(x.float()).to(low)) for x in _arranged(patterns))


def _arranged(patterns: torch.Tensor) -> Iterator[torch.Tensor]:
    """All patterns in long vectors, with strides, and in rows that are shorter than a vector."""
    yield patterns
    yield torch.stack([patterns, patterns], 1)[:, 0]
    for length in (3, 13):
        filled = torch.cat([patterns, patterns[: -patterns.numel() % length]]).view(-1, length)
        yield torch.cat([filled, filled[:, :1]], 1)[:, :length]
    yield patterns.flip(0)[1:]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two results have the same bits, any NaN for any NaN."""
    if one.dtype is not other.dtype or one.shape != other.shape:
        return False
    bits = one.contiguous().view(torch.int16) == other.contiguous().view(torch.int16)
    return bool((bits | (one.isnan() & other.isnan())).all())
