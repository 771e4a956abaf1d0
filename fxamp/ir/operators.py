"""Questions about operators that the dispatcher or the schema can answer."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node
from torch.fx.node import Argument

from fxamp.ir.facts import fact_of_node

__all__ = [
    "TO_DTYPE",
    "WRITES_UNSAID",
    "arguments_in_order",
    "is_composite",
    "is_impure",
    "is_inplace",
    "is_plain_cast",
    "is_random",
    "is_to_dtype",
    "is_write",
    "operator_name",
    "set_argument",
    "tensor_arguments",
    "written_arguments",
    "written_values",
]

TO_DTYPE = torch.ops.aten.to.dtype

# They write to the running statistics that they are given, and their schemas do not say so.
WRITES_UNSAID = frozenset(
    {
        "aten::batch_norm",
        "aten::instance_norm",
        "aten::native_batch_norm",
        "aten::cudnn_batch_norm",
        "aten::miopen_batch_norm",
        "aten::_batch_norm_impl_index",
        "aten::batch_norm_gather_stats",
        "aten::batch_norm_gather_stats_with_counts",
        "aten::batch_norm_update_stats",
    }
)

# They draw random numbers only where this argument is true.
_SWITCHES: Mapping[str, str] = MappingProxyType(
    {
        "aten::dropout": "train",
        "aten::feature_dropout": "train",
        "aten::alpha_dropout": "train",
        "aten::feature_alpha_dropout": "train",
        "aten::rrelu": "training",
    }
)


def operator_name(target: object) -> str:
    """``aten::conv2d.padding`` for an operator, the plain name for anything else."""
    if isinstance(target, OpOverload):
        return str(target.name())
    return str(getattr(target, "__name__", target))


@cache
def is_composite(target: OpOverload) -> bool:
    """Whether the C++ implementation is written in other operators, for autograd too."""
    registered = torch._C._dispatch_has_kernel_for_dispatch_key
    name = target.name()
    own = ("CPU", "AutogradCPU", "Autograd")
    return registered(name, "CompositeImplicitAutograd") and not any(registered(name, key) for key in own)


@cache
def is_inplace(target: OpOverload) -> bool:
    """Whether the operator writes to an argument (``add_``, ``out=``)."""
    return bool(target._schema.is_mutable)


@cache
def is_random(target: OpOverload) -> bool:
    """Whether torch marks the operator as one that draws random numbers."""
    return torch.Tag.nondeterministic_seeded in target.tags


def is_write(node: Node) -> bool:
    """Whether *node* calls an operator that writes to an argument, and says so."""
    return isinstance(node.target, OpOverload) and is_inplace(node.target)


def is_impure(node: Node) -> bool:
    """Whether *node* does more than return a value: it writes, draws random numbers or sets a mode."""
    if node.op in ("placeholder", "output"):
        return True
    if node.op != "call_function":
        return False
    if isinstance(node.target, OpOverload):
        return is_inplace(node.target) or _draws(node) or node.target.name() in WRITES_UNSAID
    module = getattr(node.target, "__module__", "")
    return node.target is not operator.getitem and module not in ("_operator", "math", "torch")


def _draws(node: Node) -> bool:
    """Whether a call draws random numbers: dropout that is off gives its argument back."""
    assert isinstance(node.target, OpOverload)
    if not is_random(node.target):
        return False
    given = {argument.name: value for argument, value in arguments_in_order(node)}
    switch = _SWITCHES.get(node.target.name())
    return switch is None or not (given.get(switch) is False or given.get("p") in (0, 0.0))


def is_to_dtype(node: Node) -> bool:
    """Whether *node* is a cast and nothing else: ``x.to(dtype)``."""
    return node.op == "call_function" and node.target is TO_DTYPE


def is_plain_cast(node: Node) -> bool:
    """Whether *node* is ``x.to(dtype)`` of a floating ``x`` of another dtype, no copy or layout asked for."""
    if not is_to_dtype(node) or len(node.args) != 2 or node.kwargs:
        return False
    source, fact = fact_of_node(node.args[0]), fact_of_node(node)
    return (
        source is not None
        and fact is not None
        and source.dtype is not fact.dtype
        and source.dtype.is_floating_point
        and fact.dtype.is_floating_point
    )


def arguments_in_order(node: Node) -> Iterator[tuple[torch.Argument, Argument]]:
    """The schema's arguments with the values that *node* gives, in the order of the C++ signature."""
    assert isinstance(node.target, OpOverload)
    for index, argument in enumerate(node.target._schema.arguments):
        if index < len(node.args):
            yield argument, node.args[index]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]


def tensor_arguments(node: Node, *, optional: bool = True) -> Iterator[Argument]:
    """Values of the arguments of type ``Tensor``, ``Tensor[]`` and, if *optional*, ``Tensor?``."""
    wanted = {"Tensor", "List[Tensor]"} | ({"Optional[Tensor]"} if optional else set())
    for argument, value in arguments_in_order(node):
        if str(argument.type) in wanted:
            yield value


def set_argument(node: Node, name: str, value: Argument) -> None:
    """Give *node*'s operator the argument *name*, wherever its schema has it."""
    assert isinstance(node.target, OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    index = names.index(name)
    if index < len(node.args):
        node.update_arg(index, value)
    else:
        node.update_kwarg(name, value)


def written_arguments(
    target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[torch.Tensor]:
    """The tensors that a call of *target* writes to; of ``batch_norm`` the statistics that it updates."""
    return [value for value in written_values(target, args, kwargs) if isinstance(value, torch.Tensor)]


def written_values(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """As :func:`written_arguments`, for arguments of any kind, nodes say."""
    schema = target._schema
    unsaid = target.name() in WRITES_UNSAID
    if not schema.is_mutable and not unsaid:
        return []
    values = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | dict(kwargs)
    if unsaid and not values.get("training", values.get("use_input_stats", True)):
        return []
    found: list[Any] = []
    for argument in schema.arguments:
        written = argument.alias_info is not None and argument.alias_info.is_write
        if written or (unsaid and argument.name.startswith("running_")):
            value = values.get(argument.name)
            found += value if isinstance(value, (list, tuple)) else [value]
    return found
