"""Which sizes the user wants symbolic, said as for ``torch.export``.

``dynamic_shapes`` is a dict from parameter name, or a sequence in the order of the arguments, to what holds
for each argument: for a tensor a dict ``{dim: Dim}`` or a sequence with one entry a dimension, ``None``
for all of its sizes as they are; for a container the same structure again.  A ``Dim``, ``Dim.AUTO`` or
``Dim.DYNAMIC`` makes a size symbolic; ``None``, an int or ``Dim.STATIC`` keeps the example's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from fxamp.capture.structure import flatten
from fxamp.errors import ArgumentError

__all__ = ["names_of_sizes", "symbolic_sizes"]


def symbolic_sizes(
    dynamic_shapes: Any, function: Callable[..., object], args: Any, kwargs: Any
) -> list[list[bool]]:
    """For every tensor of the call, whether each of its sizes is symbolic.

    Raises:
        ArgumentError: *dynamic_shapes* does not fit the arguments.
    """
    entries = _entries(dynamic_shapes, function, args, kwargs)
    return [[_is_symbolic(entry) for entry in of_tensor] for of_tensor in entries]


def names_of_sizes(
    dynamic_shapes: Any, function: Callable[..., object], args: Any, kwargs: Any
) -> list[list[str | None]]:
    """For every tensor of the call, the name of the ``Dim`` that each of its sizes is, if it is one.

    Raises:
        ArgumentError: *dynamic_shapes* does not fit the arguments.
    """
    entries = _entries(dynamic_shapes, function, args, kwargs)
    return [[getattr(entry, "__name__", None) for entry in of_tensor] for of_tensor in entries]


def _entries(dynamic_shapes: Any, function: Callable[..., object], args: Any, kwargs: Any) -> list[list[Any]]:
    forward = function.forward if isinstance(function, nn.Module) else function
    named = inspect.signature(forward).bind(*args, **kwargs).arguments
    if isinstance(dynamic_shapes, Mapping):
        unknown = dynamic_shapes.keys() - named.keys()
        if unknown:
            raise ArgumentError(f"dynamic_shapes names {sorted(unknown)}; the arguments are {list(named)}")
        shapes = [dynamic_shapes.get(name) for name in named]
    else:
        shapes = list(dynamic_shapes)
        if len(shapes) != len(named):
            raise ArgumentError(f"dynamic_shapes has {len(shapes)} entries for the arguments {list(named)}")
    return [
        sizes
        for (name, value), shape in zip(named.items(), shapes, strict=True)
        for sizes in _sizes(value, shape, name)
    ]


def _sizes(value: Any, shape: Any, name: str) -> list[list[Any]]:
    if isinstance(value, torch.Tensor):
        return [_sizes_of_tensor(value, shape, name)]
    if isinstance(value, (list, tuple)) and isinstance(shape, Sequence) and len(value) == len(shape):
        both = enumerate(zip(value, shape, strict=True))
        pairs = [(item, entry, f"{name}[{index}]") for index, (item, entry) in both]
    elif isinstance(value, Mapping) and isinstance(shape, Mapping):
        pairs = [(item, shape.get(key), f"{name}[{key!r}]") for key, item in value.items()]
    elif shape is None:
        return [[None] * tensor.dim() for tensor in flatten(value)[1]]
    else:
        raise ArgumentError(f"dynamic_shapes for {name!r} does not have the structure of the argument")
    return [sizes for item, entry, path in pairs for sizes in _sizes(item, entry, path)]


def _sizes_of_tensor(tensor: torch.Tensor, shape: Any, name: str) -> list[Any]:
    if shape is None:
        return [None] * tensor.dim()
    if isinstance(shape, Mapping):
        outside = [dim for dim in shape if not -tensor.dim() <= dim < tensor.dim()]
        if outside:
            raise ArgumentError(
                f"dynamic_shapes of {name!r}: no dimension {outside[0]} of {tuple(tensor.shape)}"
            )
        chosen = {dim % tensor.dim(): entry for dim, entry in shape.items()}
        return [chosen.get(dim) for dim in range(tensor.dim())]
    if len(shape) != tensor.dim():
        raise ArgumentError(f"dynamic_shapes for {name!r}: {len(shape)} entries for {tuple(tensor.shape)}")
    return list(shape)


def _is_symbolic(entry: Any) -> bool:
    return entry is not None and not isinstance(entry, int) and entry is not Dim.STATIC
