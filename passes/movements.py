"""The operators that move elements and compute nothing, with the arguments whose elements they move.

Such an operator gives the same result before a cast as behind it: ``x[i].to(low)`` is ``x.to(low)[i]``.
Backwards it is another matter: where an element is read twice its gradients are added up, in another dtype
before the cast than behind it, so a cast may change places with them where no gradient is recorded.

Some fill gaps with a number; that number must be the same in both dtypes.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch._ops import OpOverload
from torch.fx import Node

from fxamp.ir.operators import arguments_in_order

__all__ = ["fill_of", "is_exact_in", "moved_inputs"]

_SELF = """
    view reshape _unsafe_view _reshape_alias view_as reshape_as contiguous clone alias flatten.using_ints
    unflatten.int transpose.int permute t mT swapaxes swapdims movedim.int movedim.intlist
    moveaxis.int moveaxis.intlist numpy_T squeeze squeeze.dim squeeze.dims unsqueeze
    slice.Tensor select.int narrow unbind.int split.Tensor split.sizes split_with_sizes chunk
    tensor_split.sections tensor_split.indices hsplit.int vsplit.int
    diagonal expand expand_as unfold flip fliplr flipud roll rot90 repeat tile
    repeat_interleave.self_int repeat_interleave.self_Tensor pixel_shuffle pixel_unshuffle channel_shuffle
    index_select gather index.Tensor take_along_dim
    reflection_pad1d reflection_pad2d reflection_pad3d
    replication_pad1d replication_pad2d replication_pad3d
"""
_LISTS = "cat concat concatenate stack hstack vstack"
_FILLED = {"constant_pad_nd": "value", "pad": "value", "masked_fill.Scalar": "value", "tril": "", "triu": ""}

_MOVED: Mapping[str, str] = MappingProxyType(
    {f"aten::{name}": "self" for name in (*_SELF.split(), *_FILLED)}
    | {f"aten::{name}": "tensors" for name in _LISTS.split()}
)


def moved_inputs(node: Node) -> list[Node] | None:
    """The tensors whose elements *node* moves; ``None`` if it does anything else."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        source = node.args[0]
        return [source] if isinstance(source, Node) else None
    if not isinstance(node.target, OpOverload) or node.target.name() not in _MOVED:
        return None
    wanted = _MOVED[node.target.name()]
    for argument, value in arguments_in_order(node):
        if argument.name == wanted:
            items = value if isinstance(value, (list, tuple)) else [value]
            nodes = [item for item in items if isinstance(item, Node)]
            return nodes if len(nodes) == len(items) else None
    return None


def fill_of(node: Node) -> float:
    """The number that *node* fills gaps with; 0 for one that has none."""
    assert not isinstance(node.target, str)
    if not isinstance(node.target, OpOverload):
        return 0.0
    wanted = _FILLED.get(node.target.name().removeprefix("aten::"), "")
    given = {argument.name: value for argument, value in arguments_in_order(node)}
    value = given.get(wanted)
    if value is None:
        return 0.0
    return float(value) if isinstance(value, (int, float)) else float("nan")


def is_exact_in(number: float, dtype: torch.dtype) -> bool:
    """Whether *number* is a value of *dtype*."""
    return abs(number) == float("inf") or torch.tensor(number, dtype=dtype).item() == number
