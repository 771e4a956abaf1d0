"""Attention in ONNX's operators, rounded where torch's kernels round it.

A kernel of torch takes queries, keys and values in low precision and keeps the scores in float32: it
multiplies them by a scale that no low precision dtype has, and sums what they weigh before it rounds.
torch's exporter writes all of it in low precision, and multiplies queries and keys by a root of the scale
that is rounded itself.  Against torch's kernel on the CPU, 64 keys of size 48, each operator rounded as the
file says:

=========================  =====  =======================================  ================================
what is in float32         casts  decibels in float16, by the deviation    decibels in bfloat16, likewise
                                  of queries and keys: 0.3, 1, 2, 3
=========================  =====  =======================================  ================================
nothing (the exporter's)   0      68, 63, 59, 57                           50, 43, 40, 39
softmax                    2      68, 65, 60, 57                           51, 47, 42, 39
and scores                 3      68, 68, 69, 70                           51, 50, 51, 52
and what they weigh        4      71, 71, 74, 74                           53, 53, 57, 61
=========================  =====  =======================================  ================================

So the last is written; torch's kernel is not nearer to the exact result.  A score of 20 that is rounded to
eleven bits makes its probability wrong by half a percent; and probabilities that are all near to 1 / keys are
all rounded the same way, which no sum evens out.  The fourth cast is cheap: queries, keys, values and results
are cast, which for more than two heads' sizes of keys are smaller than the probabilities that the third
choice casts.  ``Attention``, of opset 23 on, is no way to say it: onnxruntime computes it in the dtype of its
inputs (66 decibels where this has 71), whatever ``softmax_precision`` is.
"""

from __future__ import annotations

import math
from typing import Any

import onnx_ir as ir
from onnxscript import onnx_opset

__all__ = ["scaled_dot_product_attention"]

op: Any = onnx_opset.opset20  # what its operators take is annotated for arrays
_HEADS = -3  # the dimension of them


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002  torch's signature
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001, FBT002
) -> Any:
    """What ``torch.nn.functional.scaled_dot_product_attention`` gives; nothing is dropped out.

    Args:
        query: Shape ``(..., heads, L, E)``, any floating dtype, which the result has; two dimensions or more.
        key: Shape ``(..., heads, S, E)``, the same dtype.
        value: Shape ``(..., heads, S, V)``, the same dtype.
        attn_mask: Broadcasts to ``(..., heads, L, S)``; bool, or a floating one that is added to the scores.
            A query all of whose keys are masked gets zeros, as from torch.
        dropout_p: Of no effect, like all dropout in what is deployed.
        is_causal: Whether query i attends to the keys up to i only.
        scale: Of the scores; by default ``E ** -0.5``.
        enable_gqa: Whether queries have more heads than keys and values, which are then repeated.

    Returns:
        Shape ``(..., heads, L, V)``.
    """
    low = query.dtype
    wide = ir.DataType.DOUBLE if low == ir.DataType.DOUBLE else ir.DataType.FLOAT
    scaled = op.Mul(_cast(query, low, wide), _scale(scale, query, wide))
    keys, values = (_repeated(heads, query) if enable_gqa else heads for heads in (key, value))
    scores = op.MatMul(scaled, _cast(_transposed(keys, len(key.shape)), low, wide))
    if is_causal:
        left = op.Where(_causal(query, key), scores, _number(wide.min, wide))
        probabilities = op.Softmax(left, axis=-1)  # no row is empty
    elif attn_mask is None:
        probabilities = op.Softmax(scores, axis=-1)
    elif attn_mask.dtype == ir.DataType.BOOL:
        probabilities = _masked(scores, attn_mask, wide)
    else:
        probabilities = _added(scores, _cast(attn_mask, attn_mask.dtype, wide), wide)
    return _cast(op.MatMul(probabilities, _cast(values, low, wide)), wide, low)


def _cast(value: Any, dtype: ir.DataType, to: ir.DataType) -> Any:
    return value if dtype == to else op.Cast(value, to=int(to))


def _number(number: Any, dtype: ir.DataType) -> Any:
    return op.Constant(value=ir.tensor(number, dtype=dtype))


def _scale(scale: float | None, query: Any, wide: ir.DataType) -> Any:
    size = query.shape[-1]
    if scale is None and not isinstance(size, int):
        return op.Reciprocal(op.Sqrt(op.Cast(_size(query, -1), to=int(wide))))
    return _number(1 / math.sqrt(size) if scale is None else scale, wide)


def _transposed(key: Any, rank: int) -> Any:
    *batch, rows, columns = range(rank)
    return op.Transpose(key, perm=[*batch, columns, rows])


def _size(value: Any, axis: int) -> Any:
    """The size of *axis* as a tensor of shape ``()``; a constant if it is known."""
    size = value.shape[axis]
    if isinstance(size, int):
        return _number(size, ir.DataType.INT64)
    at = axis % len(value.shape)
    return op.Squeeze(op.Shape(value, start=at, end=at + 1))


# --- masks --------------------------------------------------------------------------------------------


# The softmax of a row without keys would be NaN.  To replace NaN by zero would hide those of the model, so
# the rows are looked for in the mask.


def _masked(scores: Any, mask: Any, wide: ir.DataType) -> Any:
    """The softmax of *scores* where *mask*, a bool one, is true; zeros elsewhere."""
    left = op.Where(mask, scores, _number(wide.min, wide))
    return op.Where(mask, op.Softmax(left, axis=-1), _number(0.0, wide))


def _added(scores: Any, mask: Any, wide: ir.DataType) -> Any:
    """The softmax of *scores* and *mask*; zeros in the rows of which it leaves nothing."""
    best = op.ReduceMax(mask, op.Constant(value_ints=[-1]), keepdims=1)
    empty = op.Equal(best, _number(-math.inf, wide))
    return op.Where(empty, _number(0.0, wide), op.Softmax(op.Add(scores, mask), axis=-1))


def _causal(query: Any, key: Any) -> Any:
    """Shape ``(L, S)``: whether a key comes no later than a query."""
    zero, one = _number(0, ir.DataType.INT64), _number(1, ir.DataType.INT64)
    queries = op.Unsqueeze(op.Range(zero, _size(query, -2), one), op.Constant(value_ints=[1]))
    return op.GreaterOrEqual(queries, op.Range(zero, _size(key, -2), one))


# --- grouped queries ----------------------------------------------------------------------------------


def _repeated(heads: Any, query: Any) -> Any:
    """*heads* with each of its heads repeated in place, so that there are as many as in *query*."""
    if heads.shape[_HEADS] == query.shape[_HEADS]:
        return heads
    at = len(heads.shape) + _HEADS
    one = op.Constant(value_ints=[1])
    times = op.Reshape(op.Div(_size(query, _HEADS), _size(heads, _HEADS)), one)
    ones = op.Constant(value_ints=[1] * (at + 1))
    expanded = op.Expand(
        op.Unsqueeze(heads, op.Constant(value_ints=[at + 1])),
        op.Concat(ones, times, op.Constant(value_ints=[1, 1]), axis=0),
    )
    sizes = [op.Shape(heads, start=0, end=at)] if at else []
    sizes += [op.Reshape(_size(query, _HEADS), one), op.Shape(heads, start=at + 1)]
    return op.Reshape(expanded, op.Concat(*sizes, axis=0))
