"""``squeeze`` of a dimension that is no single one: torch leaves the tensor as it is, ONNX refuses the model.

A symbolic size is two or more where the program was recorded, so it stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnxscript import onnx_opset

__all__ = ["squeeze_dim", "squeeze_dims"]

op: Any = onnx_opset.opset20  # what its operators take is annotated for arrays


def squeeze_dim(self: Any, dim: int) -> Any:
    """*self* without the dimension *dim*, if its size is one."""
    return squeeze_dims(self, [dim])


def squeeze_dims(self: Any, dim: Sequence[int]) -> Any:
    """*self* without those of the dimensions *dim* whose size is one."""
    single = [each for each in dim if len(self.shape) and self.shape[each] == 1]
    return op.Squeeze(self, op.Constant(value_ints=single)) if single else op.Identity(self)
