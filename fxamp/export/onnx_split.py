"""Parts of a tensor as the results of one ``Split``.

torch's exporter makes a sequence of tensors and takes them out of it again.  ONNX has no sequences of
bfloat16, so the tensor would have to be float32 between two casts.

==================================  ==================================================================
parts                               become
==================================  ==================================================================
as equal as ONNX would make them    one ``Split``
of other sizes, in bfloat16         a ``Slice`` each
of other sizes, or unknown ones     a sequence
==================================  ==================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import onnx_ir as ir
from onnxscript import onnx_opset

__all__ = ["split", "split_with_sizes"]

op: Any = onnx_opset.opset20  # what its operators take is annotated for arrays


def split(self: Any, split_size: Any, dim: int = 0) -> Any:
    """What ``torch.split`` gives for a size of the parts, of which the last may be smaller.

    Args:
        self: At least one dimension, any dtype.
        split_size: Of all parts but the last.
        dim: The dimension that is split.

    Returns:
        The parts, or a sequence of them.
    """
    size = self.shape[dim]
    if not isinstance(size, int) or not isinstance(split_size, int) or not split_size:
        return op.SplitToSequence(self, split_size, axis=dim)
    return _parts(self, [min(split_size, size - start) for start in range(0, max(size, 1), split_size)], dim)


def split_with_sizes(self: Any, split_sizes: Any, dim: int = 0) -> Any:
    """What ``torch.split`` gives for the sizes of all parts; see :func:`split`."""
    if not isinstance(split_sizes, Sequence) or not all(isinstance(size, int) for size in split_sizes):
        return op.SplitToSequence(self, split_sizes, axis=dim)
    return _parts(self, split_sizes, dim)


def _parts(whole: Any, sizes: Sequence[int], dim: int) -> Any:
    if len(sizes) == 1:
        return (op.Identity(whole),)
    if list(sizes) == _equal(sum(sizes), len(sizes)):
        return op.Split(whole, axis=dim, num_outputs=len(sizes))
    if whole.dtype != ir.DataType.BFLOAT16:
        return op.SplitToSequence(whole, op.Constant(value_ints=list(sizes)), axis=dim)
    bounds = list(accumulate(sizes, initial=0))
    return tuple(_slice(whole, start, end, dim) for start, end in pairwise(bounds))


def _equal(size: int, count: int) -> list[int]:
    """The sizes that ``Split`` makes of *size* for a number of parts."""
    largest = -(-size // count)
    return [max(min(largest, size - largest * index), 0) for index in range(count)]


def _slice(whole: Any, start: int, end: int, dim: int) -> Any:
    bounds = (op.Constant(value_ints=[number]) for number in (start, end, dim))
    return op.Slice(whole, *bounds)
