"""What can be wrong with an operator in low precision, told by its numbers and not by its name.

Each kind says how it is told and what usually helps.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Finding", "Kind"]


class Kind(Enum):
    """The kinds of findings; the value is their name, :attr:`help` the way out."""

    OVERFLOW = "overflow"
    CONSTANT = "constant does not fit"
    VANISHED = "vanished"
    BAD_INPUT = "bad input"
    BAD_WEIGHT = "bad weight or buffer"
    BAD_STATE = "buffer poisoned"
    NOT_PRECISION = "not of precision"
    RAISES = "raises"
    CONSTANT_OUTPUT = "constant output"
    INTEGERS = "integers rounded"
    SATURATED = "saturated sum"
    STALLED = "stalled"
    UNDERFLOW = "underflow"
    CANCELLATION = "cancellation"
    AMPLIFIED = "amplified"
    TOO_COARSE = "too coarse"
    GRADIENT_OVERFLOW = "gradient overflow"
    GRADIENT_UNDERFLOW = "gradient underflow"

    @property
    def help(self) -> str:
        """What usually helps."""
        return _HELP[self]

    @property
    def tier(self) -> int:
        """How bad it is, whatever the error: 3 makes Inf or NaN, 2 is finite and wrong, 1 is rounding."""
        return 3 if self in _TIER_3 else 2 if self in _TIER_2 else 1


_TIER_3 = (
    Kind.OVERFLOW,
    Kind.CONSTANT,
    Kind.VANISHED,
    Kind.BAD_INPUT,
    Kind.BAD_WEIGHT,
    Kind.BAD_STATE,
    Kind.NOT_PRECISION,
    Kind.RAISES,
    Kind.GRADIENT_OVERFLOW,
)
_TIER_2 = (
    Kind.CONSTANT_OUTPUT,
    Kind.INTEGERS,
    Kind.SATURATED,
    Kind.STALLED,
    Kind.UNDERFLOW,
    Kind.GRADIENT_UNDERFLOW,
)

_FLOAT32 = "compute it in float32"
_HELP = {
    Kind.OVERFLOW: f"{_FLOAT32}, or scale down what goes in",
    Kind.CONSTANT: "take torch.finfo(x.dtype).min or a number that the dtype has",
    Kind.VANISHED: f"take a larger eps, or {_FLOAT32}",
    Kind.BAD_INPUT: "look at the data",
    Kind.BAD_WEIGHT: "look at the checkpoint; running statistics can be reset",
    Kind.BAD_STATE: "keep the operator before it finite; reset the buffer",
    Kind.NOT_PRECISION: "look at the formula: more precision does not help",
    Kind.RAISES: "take a number that the dtype has",
    Kind.CONSTANT_OUTPUT: f"{_FLOAT32}, from where the values leave the range",
    Kind.INTEGERS: "keep positions and counts in float32 or as integers",
    Kind.SATURATED: "add up in float32",
    Kind.STALLED: "add up in float32",
    Kind.UNDERFLOW: f"{_FLOAT32}, or scale up what goes in",
    Kind.CANCELLATION: f"{_FLOAT32}, together with what it subtracts",
    Kind.AMPLIFIED: f"{_FLOAT32}, together with what goes in",
    Kind.TOO_COARSE: _FLOAT32,
    Kind.GRADIENT_OVERFLOW: "a smaller loss scale, or float32 there",
    Kind.GRADIENT_UNDERFLOW: "scale the loss (amp.scaler), or float32 there",
}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong at one operator.

    Attributes:
        kind: What.
        detail: The numbers that show it.
        input: The index of the input at which it was first seen.
        order: When, counted in operators over all inputs; backward comes after forward.
    """

    kind: Kind
    detail: str
    input: int
    order: int

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.detail}"
