"""Which operators of a model onnxruntime's CPU provider has no low precision kernels for, and what it does.

==========  ============================================================================================
dtype       an operator without a kernel
==========  ============================================================================================
float16     is run in float32, between casts that onnxruntime inserts when it loads the model; one that ONNX
            composes of others, as those
bfloat16    is refused, and the model with it; other providers and runtimes have kernels
==========  ============================================================================================
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import onnx_ir as ir
from onnx_ir.traversal import RecursiveGraphIterator

from fxamp.export.onnx_legalize import schema_of, type_variables

__all__ = ["has_kernel", "lacking", "tell_lacking"]

_LOW = {ir.DataType.FLOAT16: "float16", ir.DataType.BFLOAT16: "bfloat16"}
_PROVIDER = "CPUExecutionProvider"


def lacking(model: ir.Model) -> dict[str, Counter[str]]:
    """For each low precision dtype the operators that have no kernel in it, and how often they occur."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for node in RecursiveGraphIterator(model.graph):
        dtypes = {value.dtype for value in (*node.inputs, *node.outputs) if value is not None}
        low = next((_LOW[dtype] for dtype in _LOW if dtype in dtypes), None)
        if low is not None and not has_kernel(node, model.opset_imports):
            found[low][node.op_type] += 1
    return dict(found)


def tell_lacking(found: Mapping[str, Counter[str]]) -> list[str]:
    """A line for each dtype: which operators, and what happens to them."""
    lines = []
    for low, counts in found.items():
        names = ", ".join(f"{name} ({count})" for name, count in counts.most_common())
        what = (
            "it runs them in float32, between casts of its own"
            if low == "float16"
            else "it does not load the model; providers for GPUs and other runtimes do"
        )
        lines.append(f"onnxruntime's CPU provider has no {low} kernel for {names}: {what}")
    return lines


def has_kernel(node: ir.Node, opsets: Mapping[str, int]) -> bool:
    """Whether the CPU provider runs *node* in the dtypes that it has."""
    schema = schema_of(node, opsets)
    if schema is None:
        return False
    wanted = {
        name: f"tensor({node.inputs[indices[0]].dtype.name.lower()})"  # type: ignore[union-attr]
        for name, indices in type_variables(node, schema).items()
        if node.inputs[indices[0]].dtype is not None  # type: ignore[union-attr]
    }
    kernels = _kernels().get((node.domain, node.op_type), ())
    version = opsets[node.domain]
    return any(_takes(kernel, wanted, version) for kernel in kernels)


def _takes(kernel: Any, wanted: Mapping[str, str], version: int) -> bool:
    first, last = kernel.version_range
    if not first <= version <= last:
        return False
    constraints: Mapping[str, Iterable[str]] = kernel.type_constraints
    return all(dtype in constraints[name] for name, dtype in wanted.items() if name in constraints)


@cache
def _kernels() -> dict[tuple[str, str], list[Any]]:
    from onnxruntime.capi import onnxruntime_pybind11_state as state  # noqa: PLC0415  slow to load

    found: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for kernel in state.get_all_opkernel_def():
        if kernel.provider == _PROVIDER:
            found[kernel.domain, kernel.op_name].append(kernel)
    return dict(found)
