"""Operators that only move, view, copy, convert or make values, or write to an argument.

An override by module, source line or predicate is about computing, so it passes over these: a cast before a
view would cut the view off from what it shows, a cast before an in-place operator would lose what is
written, and what merely moves values keeps whatever dtype they have.
"""

from __future__ import annotations

from functools import cache

from torch._ops import OpOverload

__all__ = ["ONLY_INPUT", "is_passive", "why_passive"]

_MOVES = frozenset(
    [
        "cat",
        "concat",
        "concatenate",
        "stack",
        "hstack",
        "vstack",
        "dstack",
        "column_stack",
        "row_stack",
        "block_diag",
        "index",
        "index_select",
        "gather",
        "take",
        "take_along_dim",
        "masked_select",
        "where",
        "embedding",
        "one_hot",
        "repeat",
        "repeat_interleave",
        "tile",
        "roll",
        "flip",
        "fliplr",
        "flipud",
        "rot90",
        "tril",
        "triu",
        "diag",
        "diag_embed",
        "pad",
        "constant_pad_nd",
        "reflection_pad1d",
        "reflection_pad2d",
        "reflection_pad3d",
        "replication_pad1d",
        "replication_pad2d",
        "replication_pad3d",
        "_pad_circular",
        "_pad_enum",
        "clone",
        "contiguous",
        "reshape",
        "flatten",
        "view_copy",
        "lift",
        "lift_fresh",
        "lift_fresh_copy",
        "detach",
        "alias",
        "scatter",
        "index_put",
        "index_copy",
        "index_fill",
        "masked_fill",
        "masked_scatter",
        "select_scatter",
        "slice_scatter",
        "diagonal_scatter",
        "as_strided_scatter",
        "pixel_shuffle",
        "pixel_unshuffle",
        "channel_shuffle",
        "im2col",
        "col2im",
        "meshgrid",
        "cartesian_prod",
        "combinations",
        "broadcast_tensors",
        "atleast_1d",
        "atleast_2d",
        "atleast_3d",
        "unfold_backward",
        "combine",
        "tensor_split",
    ]
)
_CONVERTS = frozenset(
    ["to", "_to_copy", "type_as", "float", "half", "bfloat16", "double", "_autocast_to_full_precision"]
)
_CONVERTS |= frozenset({"_autocast_to_reduced_precision", "_cast_Float", "_cast_Half", "item", "is_nonzero"})
_ASKS = ("sym_", "is_", "_local_scalar", "_assert", "dim", "numel", "size", "stride", "equal", "result_type")

ONLY_INPUT = frozenset(
    f"aten::{name}" for name in ("batch_norm", "instance_norm", "native_batch_norm", "cudnn_batch_norm")
)
"""Operators of which an override casts the first argument alone: they write to the running statistics that
they are given, and their kernels take parameters of those's dtype with an input of another."""


def is_passive(operator: OpOverload) -> bool:
    """Whether *operator* computes nothing that a precision could be chosen for."""
    return bool(why_passive(operator))


@cache
def why_passive(operator: OpOverload) -> str:
    """What *operator* does instead of computing, ``""`` if it computes."""
    schema = operator._schema
    name = schema.name.split("::")[-1]
    if schema.is_mutable:
        return "writes to an argument, which a cast would replace by a copy"
    if name in _CONVERTS:
        return "converts; the model says to which dtype"
    if any(returned.alias_info is not None for returned in schema.returns):
        return "gives a view of its argument, which a cast would cut off"
    if name in _MOVES:
        return "moves values as they are"
    if name.endswith("_like") or name.startswith(("new_", *_ASKS)):
        return "computes nothing from the values of its argument"
    return ""
