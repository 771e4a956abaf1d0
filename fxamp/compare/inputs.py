"""What a model is called with, from what the user hands over.

==================================  ==========================================================
a tensor                            one call with this argument
a tuple                             one call with these arguments
a dict                              one call with these keyword arguments
a list, a data loader, an iterator  a call for each item, which is one of the above or a list
==================================  ==========================================================

An item of a loader is often ``(inputs, labels)``: what the model has no parameter for is left to the loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxamp.errors import ArgumentError

__all__ = ["Item", "count_of", "items_of"]


@dataclass(frozen=True)
class Item:
    """One call.

    Attributes:
        args: Positional arguments.
        kwargs: Keyword arguments.
        rest: What comes behind the arguments: the labels.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    rest: tuple[Any, ...] = ()


def items_of(inputs: Any, model: Callable[..., Any]) -> Iterator[Item]:
    """The calls that *inputs* stand for.

    Raises:
        ArgumentError: There are none, or *inputs* is nothing that a model is called with.
    """
    if isinstance(inputs, (torch.Tensor, tuple, Mapping)):
        yield _item(inputs, model)
        return
    if isinstance(inputs, (str, bytes)) or not isinstance(inputs, Iterable):
        raise ArgumentError(
            f"inputs is a tensor, a tuple of arguments, a dict of keyword arguments, or a list or loader of "
            f"these, not {type(inputs).__name__}\n  for example:  fxamp.compare(model, (images,))"
        )
    empty = True
    for item in inputs:
        empty = False
        yield _item(item, model)
    if empty:
        raise ArgumentError("inputs is empty: there is nothing to call the model with")


def count_of(inputs: Any) -> int | None:
    """How many calls *inputs* stand for, where that is known."""
    if isinstance(inputs, (torch.Tensor, tuple, Mapping)):
        return 1
    if isinstance(inputs, Sized):
        try:
            return len(inputs)
        except TypeError:
            return None
    return None


def _item(value: Any, model: Callable[..., Any]) -> Item:
    if isinstance(value, Mapping):
        return Item((), dict(value))
    if not isinstance(value, (tuple, list)):
        return Item((value,), {})
    most = _most_arguments(model)
    return Item(tuple(value[:most]), {}, tuple(value[most:]))


def _most_arguments(model: Callable[..., Any]) -> int | None:
    """How many positional arguments *model* takes; ``None`` where there is no bound."""
    function = model.forward if isinstance(model, nn.Module) else model
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return None
    return sum(
        parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        for parameter in parameters
    )
