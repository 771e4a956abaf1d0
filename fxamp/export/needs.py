"""What must be imported before a program is loaded: its operators, and the classes around its tensors."""

from __future__ import annotations

from collections.abc import Iterator

from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

__all__ = ["needed_imports"]

_ALWAYS_THERE = ("torch", "builtins", "collections")
_BUILT_IN = ("aten", "prims", "prim", "higher_order", "quantized", "_c10d_functional")


def needed_imports(program: ExportedProgram) -> tuple[str, ...]:
    """Packages with what torch itself does not know; ``torchvision`` for ``torchvision::nms``."""
    found = [*_of_operators(program), *_of_classes(program)]
    return tuple(sorted({name for name in found if name.partition(".")[0] not in _ALWAYS_THERE}))


def _of_operators(program: ExportedProgram) -> Iterator[str]:
    for module in program.graph_module.modules():
        if not isinstance(module, GraphModule):
            continue
        for node in module.graph.nodes:
            if isinstance(node.target, OpOverload) and node.target.namespace not in _BUILT_IN:
                yield _module_of(node.target)


def _module_of(operator: OpOverload) -> str:
    """Where a custom operator is defined in Python; else the package that is called as its namespace is."""
    from torch._library.custom_ops import OPDEFS  # noqa: PLC0415  not public

    definition = OPDEFS.get(f"{operator.namespace}::{operator._opname}")
    if definition is None:
        return operator.namespace
    return str(definition._init_fn.__module__)


def _of_classes(program: ExportedProgram) -> Iterator[str]:
    for spec in (program.call_spec.in_spec, program.call_spec.out_spec):
        if spec is not None:
            yield from _of_spec(spec)


def _of_spec(spec: pytree.TreeSpec) -> Iterator[str]:
    if spec.type is not None:
        yield spec.type.__module__
    for child in spec.children():
        yield from _of_spec(child)
