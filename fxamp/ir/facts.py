"""What is known of a value before it exists.

A :class:`Fact` is what autocast asks of a tensor: its dtype, its device, whether it takes part in the
gradient and whether it is a leaf whose cast eager autocast would cache.  Sizes are ints, or SymPy
expressions in the sizes of the inputs.  ``node.meta["fact"]`` holds one fact, a tuple of them for an
operator with several results, or ``None`` for what is no tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import sympy
import torch
from torch.fx import Node

__all__ = [
    "Fact",
    "Facts",
    "Size",
    "dtype_names",
    "example_size",
    "fact_of",
    "fact_of_node",
    "is_cacheable_leaf",
    "size_of",
]

Size: TypeAlias = "int | sympy.Expr"


@dataclass(frozen=True)
class Fact:
    """dtype, shape and place in the gradient of one tensor.

    Attributes:
        dtype: Its element type.
        shape: One size a dimension.
        device: Where it lives.
        requires_grad: Whether gradients flow into it; never in inference mode.
        leaf: Whether it is a leaf of the gradient that is not a view; eager autocast casts such a
            float32 tensor once per region and reuses the cast (``is_leaf && requires_grad && !is_view``
            in ATen/autocast_mode.cpp).
    """

    dtype: torch.dtype
    shape: tuple[Size, ...]
    device: torch.device
    requires_grad: bool = False
    leaf: bool = False

    def cast_to(self, dtype: torch.dtype, *, grad: bool) -> Fact:
        """The fact of this value after a cast to *dtype*, made with gradients recorded if *grad*."""
        return replace(self, dtype=dtype, leaf=False, requires_grad=self.requires_grad and grad)

    @property
    def bytes(self) -> Size:
        """How much memory its elements take, an expression where a size is."""
        count: Any = math.prod(self.shape)
        total: Size = count * self.dtype.itemsize
        return total

    def __str__(self) -> str:
        sizes = ", ".join(str(size) for size in self.shape)
        return f"{self.dtype.abbr}[{sizes}]"


Facts: TypeAlias = "Fact | tuple[Facts, ...] | None"


def size_of(size: int | torch.SymInt) -> Size:
    """*size* as an int, or as the SymPy expression behind a symbolic one."""
    if isinstance(size, int):
        return size
    expr = size.node.expr
    return int(expr) if expr.is_number else cast("sympy.Expr", expr)


def example_size(size: int | torch.SymInt) -> int | None:
    """*size* in the example that was captured; ``None`` for one that depends on data."""
    if isinstance(size, int):
        return size
    hint: Any = size.node.hint if size.node.has_hint() else None
    return None if hint is None else int(hint)


def is_cacheable_leaf(tensor: torch.Tensor) -> bool:
    """Whether eager autocast would keep one cast of *tensor* for the length of a region."""
    return _takes_part_in_gradient(tensor) and tensor.is_leaf and not tensor._is_view()


def fact_of(value: object) -> Facts:
    """The fact of a tensor, the facts of a list of them, ``None`` for anything else."""
    if isinstance(value, torch.Tensor):
        shape = tuple(size_of(size) for size in value.shape)
        return Fact(
            value.dtype, shape, value.device, _takes_part_in_gradient(value), is_cacheable_leaf(value)
        )
    if isinstance(value, (list, tuple)):
        return tuple(fact_of(item) for item in value)
    return None


def _takes_part_in_gradient(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and not torch.is_inference_mode_enabled()


def dtype_names(facts: Facts) -> tuple[str, ...]:
    """The dtypes in *facts*, in order, as ``bf16``."""
    if isinstance(facts, Fact):
        return (facts.dtype.abbr,)
    return tuple(name for fact in facts for name in dtype_names(fact)) if isinstance(facts, tuple) else ()


def fact_of_node(node: object) -> Fact | None:
    """The fact of the one tensor that *node* stands for; ``None`` if it stands for anything else."""
    if not isinstance(node, Node):
        return None
    fact = node.meta.get("fact")
    return fact if isinstance(fact, Fact) else None
