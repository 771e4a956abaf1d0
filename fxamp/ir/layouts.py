"""How a value lies in memory, as far as a cast can change it.

``x.to(dtype)`` keeps the strides of ``x`` where its elements fill their memory without gaps or overlaps;
any other ``x`` it packs.  So a cast may change places with a view only between two such values: then what
reads the result sees the same strides.  It must also begin where a fresh allocation might, for kernels pick
their code by alignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import sympy
import torch
from torch.fx import Node

from fxamp.ir.facts import Size, example_size, size_of
from fxamp.ir.operators import is_plain_cast

__all__ = ["ALIGNMENT", "Layout", "layout_of"]

ALIGNMENT = 64
"""Bytes; what the allocators of torch give at the least."""


@dataclass(frozen=True)
class Layout:
    """Sizes, strides and place of one tensor.

    Attributes:
        shape: One size a dimension.
        strides: Likewise, in elements.
        offset: Where it begins in its memory, in elements.
        example: Its sizes in the example that was captured; ``None`` if they depend on data.
        dense: Whether its elements fill their memory without gaps or overlaps, for all sizes.
    """

    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    offset: Size
    example: tuple[int, ...] | None
    dense: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> Layout | None:
        """The layout of a strided *tensor*."""
        if tensor.layout is not torch.strided:
            return None
        hints = [example_size(size) for size in tensor.shape]
        steps = [example_size(stride) for stride in tensor.stride()]
        shape, strides = tuple(map(size_of, tensor.shape)), tuple(map(size_of, tensor.stride()))
        known = None not in hints and None not in steps
        return Layout(
            shape=shape,
            strides=strides,
            offset=size_of(tensor.storage_offset()),
            example=tuple(hint for hint in hints if hint is not None) if known else None,
            dense=known and _is_dense(shape, strides, [step or 0 for step in steps]),
        )

    def is_aligned(self, dtype: torch.dtype) -> bool:
        """Whether it begins at a multiple of :data:`ALIGNMENT` bytes if its memory does, in *dtype*."""
        step = ALIGNMENT // dtype.itemsize
        if isinstance(self.offset, int):
            return self.offset % step == 0
        return all(
            coefficient.is_Integer and coefficient % step == 0
            for coefficient in sympy.expand(self.offset).as_coefficients_dict().values()
        )

    @property
    def is_contiguous(self) -> bool:
        """Whether it is dense, and the strides go down from the first dimension to the last."""
        return self.dense and all(
            self.shape[index] == 1 or self.strides[index] == prod(self.shape[index + 1 :], start=1)
            for index in range(len(self.shape))
        )

    @property
    def count(self) -> int | None:
        """How many elements it has in the example."""
        if self.example is None:
            return None
        return prod(self.example)


def _is_dense(shape: Sequence[Size], strides: Sequence[Size], steps: Sequence[int]) -> bool:
    reach: Size = 1
    for index in sorted(range(len(shape)), key=lambda index: steps[index]):
        if shape[index] == 1:
            continue
        if strides[index] != reach and sympy.expand(strides[index] - reach) != 0:
            return _is_dense_beside_ties(shape, strides, steps)
        reach = reach * shape[index]
    return True


def _is_dense_beside_ties(shape: Sequence[Size], strides: Sequence[Size], steps: Sequence[int]) -> bool:
    """Whether each stride is the size of what lies inside it, in any order (equal examples tie)."""
    left = [index for index in range(len(shape)) if shape[index] != 1]
    if len({steps[index] for index in left}) == len(left):
        return False
    reach: Size = 1
    while left:
        found = next((i for i in left if sympy.expand(strides[i] - reach) == 0), None)
        if found is None:
            return False
        left.remove(found)
        reach = reach * shape[found]
    return True


def layout_of(node: Node) -> Layout | None:
    """The layout of the one tensor that *node* stands for; ``None`` if it is not known."""
    if "layout" not in node.meta:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            node.meta["layout"] = Layout.of(value)
        elif is_plain_cast(node) and isinstance(node.args[0], Node):
            source = layout_of(node.args[0])
            return source if source is not None and source.dense else None
        else:
            return None
    found = node.meta["layout"]
    return found if isinstance(found, Layout) else None
