"""The product of rows by the matrix of their group, as a product a group.

Rows that are sorted by expert meet that expert's matrix: ``out[start:end] = rows[start:end] @ weight[group]``
where ``end`` is ``offs[group]``.  ONNX has no such operator.  Here each group is a ``Slice`` and a ``MatMul``
of as many rows as there are, none perhaps; rows behind the last group are zero.

So it is written by transformers' mixtures of experts, where torch's own ``_grouped_mm`` does not do.
"""

from __future__ import annotations

from typing import Any

import torch
from onnxscript import onnx_opset

__all__ = ["grouped_mm", "grouped_operators"]

op: Any = onnx_opset.opset20  # what its operators take is annotated for arrays

_NAMES = ("transformers::grouped_mm_fallback",)


def grouped_operators() -> tuple[Any, ...]:
    """The operators of that meaning that are registered in this process."""
    known = set(torch._C._dispatch_get_all_op_names())
    packets = [name.split("::") for name in _NAMES if name in known]
    return tuple(getattr(getattr(torch.ops, space), name).default for space, name in packets)


def grouped_mm(rows: Any, weight: Any, offs: Any) -> Any:
    """The products of rows by the matrices of their groups.

    Args:
        rows: ``[rows, inputs]``, sorted by group.
        weight: ``[groups, inputs, outputs]``, in the dtype of the rows.
        offs: ``[groups]``, integers: where each group ends.

    Returns:
        ``[rows, outputs]``, in the dtype of the rows.

    Raises:
        ValueError: The number of groups or of outputs is not known.
    """
    groups, _, outputs = weight.shape
    is_known = isinstance(groups, int) and isinstance(outputs, int)
    if not is_known:
        raise ValueError("the product of groups needs a known number of groups and of outputs")
    ends = op.Concat(op.Constant(value_ints=[0]), op.Cast(offs, to=7), op.Shape(rows, start=0, end=1), axis=0)
    bounds = [op.Gather(ends, op.Constant(value_ints=[at]), axis=0) for at in range(groups + 2)]
    axis = op.Constant(value_ints=[0])
    parts = [op.Slice(rows, bounds[at], bounds[at + 1], axis) for at in range(groups + 1)]
    products = [
        op.MatMul(part, op.Gather(weight, op.Constant(value_int=at), axis=0))
        for at, part in enumerate(parts[:groups])
    ]
    behind = op.Concat(op.Shape(parts[groups], start=0, end=1), op.Constant(value_ints=[outputs]), axis=0)
    zero = op.CastLike(op.Constant(value_float=0.0), rows)
    return op.Concat(*products, op.Expand(zero, behind), axis=0)
