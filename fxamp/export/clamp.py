"""Change the constants that low precision does not have into the nearest that it has, on request only.

    module, changed = clamped(frozen.graph_module, float32_weights)

A number or element beyond the largest becomes the largest of its sign, one that becomes 0 the smallest
normal number of its sign, a bound that becomes 1 the number next to 1 on its own side.  It is changed where
it enters the graph, so float32 operators that read the same constant see the change, too.  Results are no
longer those of eager autocast.

The rounded copy of a frozen weight has Inf already where it does not fit, so it is made anew of the float32
values.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from functools import partial

import torch
from torch.fx import GraphModule

from fxamp.export.fits import Kind, Unfit, before_rounding, find
from fxamp.ir.operators import set_argument

__all__ = ["clamped"]


def clamped(
    module: GraphModule, weights: Mapping[str, torch.Tensor] | None = None
) -> tuple[GraphModule, tuple[Unfit, ...]]:
    """A copy of *module* whose constants fit, and what was changed; *module* itself if nothing was.

    Tensors that fit are shared with *module*, which stays as it is.

    Args:
        module: As for :func:`~fxamp.export.fits.unfit`.
        weights: Likewise.
    """
    if not any(True for _ in find(module, weights or {})):
        return module, ()
    copied = _copied(module)
    changed: dict[Unfit, None] = {}
    tensors: dict[tuple[GraphModule, str], torch.Tensor] = {}
    for finding, part, spot in list(find(copied, weights or {})):
        changed[finding] = None
        if spot.argument:
            set_argument(spot.node, spot.argument, _number(finding))
            continue
        key = part, str(spot.node.target)
        if key not in tensors:
            tensors[key] = before_rounding(part, spot.node, weights or {}).detach()
        tensors[key] = _elements(tensors[key], finding)
        if "unrounded" in spot.node.meta:
            spot.node.meta["unrounded"] = partial(tensors.__getitem__, key)
    for (part, target), tensor in tensors.items():
        _set_attribute(part, target, tensor)
    for child in copied.modules():
        if isinstance(child, GraphModule):
            child.recompile()
    return copied, tuple(changed)


def _copied(module: GraphModule) -> GraphModule:
    """*module* with graphs of its own and the same tensors."""
    tensors = [*module.parameters(), *module.buffers()]
    memo = {id(tensor): tensor for tensor in tensors}
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, torch.Tensor):
                memo[id(value)] = value
    return copy.deepcopy(module, memo)


def _number(finding: Unfit) -> float:
    limits = torch.finfo(finding.dtype)
    if finding.kind is Kind.OVERFLOWS:
        return math.copysign(limits.max, finding.value)
    if abs(finding.value) < limits.smallest_normal:
        return math.copysign(limits.smallest_normal, finding.value)
    beside = 1 - limits.eps / 2 if abs(finding.value) < 1 else 1 + limits.eps
    return math.copysign(beside, finding.value)


def _elements(tensor: torch.Tensor, finding: Unfit) -> torch.Tensor:
    limits = torch.finfo(finding.dtype)
    if finding.kind is Kind.OVERFLOWS:
        return torch.where(tensor.isinf(), tensor, tensor.clamp(-limits.max, limits.max))
    is_flushed = (tensor != 0) & (tensor.to(finding.dtype) == 0)
    return torch.where(
        is_flushed, torch.copysign(torch.full_like(tensor, limits.smallest_normal), tensor), tensor
    )


def _set_attribute(module: GraphModule, target: str, tensor: torch.Tensor) -> None:
    """Put *tensor* in the place of what the graph reads as *target*, in its dtype."""
    path, _, name = target.rpartition(".")
    holder = module.get_submodule(path)
    old: torch.Tensor = getattr(holder, name)
    new = tensor.to(old.dtype)
    if name in holder._parameters:
        holder._parameters[name] = torch.nn.Parameter(new, requires_grad=old.requires_grad)
    elif name in holder._buffers:
        holder._buffers[name] = new
    else:
        setattr(holder, name, new)
