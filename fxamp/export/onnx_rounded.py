"""Operators that torch rounds once, or after each product, and so does ONNX here.

torch's exporter composes an operator that ONNX lacks of several; each of them rounds, where the kernel of
torch computes in float32 and rounds its result.  In bfloat16 a second rounding leaves 51 decibels of a
result, in float16 69.

==========================  ==============================================================================
operator                    becomes
==========================  ==============================================================================
linear with a bias          ``Gemm`` of rows, which adds the bias before it rounds
silu, glu, log_sigmoid,     in bfloat16 their parts in float32, between casts; in float16 two casts cost
rsqrt                       more than they are worth
x * 0.3, x / 0.3            the same, if bfloat16 does not have the number: torch does not round it (that of
                            a sum it does), and all elements would be wrong the same way
pow by 3 in low precision   two products, since torch rounds both
==========================  ==============================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import onnx_opset

__all__ = ["glu", "linear", "log_sigmoid", "pow_by_number", "rsqrt", "silu", "with_number"]

op: Any = onnx_opset.opset20  # what its operators take is annotated for arrays
_LOW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def linear(input: Any, weight: Any, bias: Any = None) -> Any:  # noqa: A002  torch's signature
    """``input @ weight.T + bias``, rounded once.

    Args:
        input: Shape ``(..., K)``.
        weight: Shape ``(N, K)``, or ``(K,)`` if there is no bias; the same dtype.
        bias: Shape ``(N,)``, the same dtype.

    Returns:
        Shape ``(..., N)``, or ``(...)``.
    """
    if len(weight.shape) == 1:
        return op.MatMul(input, weight)
    if bias is None:
        return op.MatMul(input, op.Transpose(weight, perm=[1, 0]))
    if len(input.shape) == 2:
        return op.Gemm(input, weight, bias, transB=1)
    *batch, size = list(input.shape)
    known = all(isinstance(each, int) for each in batch)
    count = op.Constant(value_ints=[math.prod(batch) if known else -1, int(size)])
    rows = op.Reshape(input, count, allowzero=int(known))  # else a size of 0 is that of the input
    return _of_batch(op.Gemm(rows, weight, bias, transB=1), input, int(weight.shape[0]))


def _of_batch(rows: Any, value: Any, last: int) -> Any:
    """*rows* in the shape of *value*, but for the last size; a constant one if one size is open at most."""
    sizes = [size if isinstance(size, int) else -1 for size in list(value.shape)[:-1]]
    if sizes.count(-1) == 1 and 0 not in sizes:
        return op.Reshape(rows, op.Constant(value_ints=[*sizes, last]))
    if -1 not in sizes:
        return op.Reshape(rows, op.Constant(value_ints=[*sizes, last]), allowzero=1)
    shape = op.Concat(op.Shape(value, end=-1), op.Constant(value_ints=[last]), axis=0)
    return op.Reshape(rows, shape, allowzero=1)


def silu(self: Any) -> Any:
    """``x * sigmoid(x)``."""
    return _in_float32(lambda x: op.Mul(x, op.Sigmoid(x)), self)


def log_sigmoid(self: Any) -> Any:
    """``log(sigmoid(x))``."""
    return _in_float32(lambda x: op.Log(op.Sigmoid(x)), self)


def rsqrt(self: Any) -> Any:
    """``1 / sqrt(x)``."""
    return _in_float32(lambda x: op.Reciprocal(op.Sqrt(x)), self)


def glu(self: Any, dim: int = -1) -> Any:
    """The first half of *dim* times the sigmoid of the second."""

    def gated(whole: Any) -> Any:
        first, second = op.Split(whole, axis=dim, num_outputs=2)
        return op.Mul(first, op.Sigmoid(second))

    return _in_float32(gated, self)


def with_number(operator: str, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """A translation of a product or quotient whose second argument may be a number.

    Args:
        operator: ONNX's name.
        otherwise: The exporter's translation.
    """

    def translate(self: Any, other: Any) -> Any:
        number = _number(other)
        if number is None or self.dtype != ir.DataType.BFLOAT16 or not _is_rounded(number):
            return otherwise(self, other)
        wide = op.Constant(value=ir.tensor(number, dtype=ir.DataType.FLOAT))
        return _in_float32(lambda x: getattr(op, operator)(x, wide), self)

    return translate


def _number(value: Any) -> float | None:
    """The number that the exporter has made the tensor *value* of; ``None`` if the model has made it."""
    made = value.producer() if isinstance(value, ir.Value) else None
    node = made.meta.get("node") if made is not None else None
    scalar = torch.ops.aten.scalar_tensor.default
    if node is None or node.target is not scalar or node.meta.get("original_aten") is scalar:
        return None
    (number,) = node.args
    return number if isinstance(number, (int, float)) else None


def _is_rounded(number: float) -> bool:
    """Whether bfloat16 does not have *number*."""
    return bool(torch.tensor(number, dtype=torch.bfloat16).item() != number)


def pow_by_number(self: Any, exponent: float) -> Any:
    """``x ** exponent``; a cube in low precision is rounded after each product."""
    if exponent == 3 and self.dtype in _LOW:
        return op.Mul(op.Mul(self, self), self)
    if not self.dtype.is_floating_point() and not isinstance(exponent, int):
        self, dtype = op.Cast(self, to=int(ir.DataType.FLOAT)), ir.DataType.FLOAT
    else:
        dtype = self.dtype
    return op.Pow(self, op.Constant(value=ir.tensor(exponent, dtype=dtype)))


def _in_float32(compute: Callable[[Any], Any], value: Any) -> Any:
    if value.dtype != ir.DataType.BFLOAT16:
        return compute(value)
    wide = compute(op.Cast(value, to=int(ir.DataType.FLOAT)))
    return op.Cast(wide, to=int(ir.DataType.BFLOAT16))
