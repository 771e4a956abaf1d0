"""Calls of every operator in torch's own database (OpInfo), in float32 and in mixtures with a low dtype."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._pytree import tree_map

from tests.conformance.comparison import Call

__all__ = ["OPERATORS", "calls_of", "unseeded"]

Mixture = Literal["f32", "low", "first low"]
MIXTURES: tuple[Mixture, ...] = ("f32", "low", "first low")
"""All tensors float32; all in the low dtype; the first in the low dtype, the others float32."""

UNINITIALISED = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)
"""Their results are whatever the memory held: they are zeroed before they are compared."""


def _name(op: OpInfo) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


OPERATORS: dict[str, OpInfo] = {_name(op): op for op in op_db if torch.float32 in op.dtypes}


def unseeded() -> Any:
    """Let random operators draw as they do in a model: OpInfo would seed torch inside of the call."""
    return mock.patch.object(common_methods_invocations, "wrapper_set_seed", _call)


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def calls_of(name: str, low: torch.dtype, most: int) -> Iterator[Call]:
    """Calls of the operator: *most* samples spread over its list, each mixture, out of place and in place."""
    op = OPERATORS[name]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # sparse layouts are in beta
        samples = list(op.sample_inputs("cpu", torch.float32, requires_grad=op.supports_autograd))
    chosen = {int((index + 0.5) * len(samples) / most) for index in range(most)}
    for index in sorted(chosen):
        sample = samples[index]
        for variant, function in _variants(name, op):
            for mixture in MIXTURES:
                args, kwargs = _mix(((sample.input, *sample.args), sample.kwargs), mixture, low)
                yield Call(f"{name}{variant}[{index}] {mixture}", function, args, kwargs)


def _variants(name: str, op: OpInfo) -> Iterator[tuple[str, Callable[..., Any]]]:
    yield "", _zeroed(op.op) if name in UNINITIALISED else op.op
    if op.inplace_variant is not None:
        yield " in place", _on_a_copy(op.inplace_variant)


def _zeroed(function: Callable[..., Any]) -> Callable[..., Any]:
    def zeroed(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs).detach().zero_()

    return zeroed


def _on_a_copy(function: Callable[..., Any]) -> Callable[..., Any]:
    def on_a_copy(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        return function(first.clone(), *args, **kwargs)

    return on_a_copy


def _mix(values: Any, mixture: Mixture, low: torch.dtype) -> Any:
    seen = 0

    def mixed(value: Any) -> Any:
        nonlocal seen
        if not isinstance(value, Tensor) or value.dtype is not torch.float32:
            return value
        seen += 1
        if mixture == "f32" or (mixture == "first low" and seen > 1):
            return value
        return value.detach().to(low).requires_grad_(value.requires_grad)

    return tree_map(mixed, values)
