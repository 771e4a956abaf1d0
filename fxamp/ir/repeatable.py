"""Which operators give the same bits each time that they are given the same tensors.

An operator of ATen does if torch does not mark it as random, or as one that reads values on the host, and if
it is none of the few below.  What it writes to must be plain: its first argument.  Of an operator from
elsewhere nobody knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

import torch
from torch._ops import OpOverload

from fxamp.ir.operators import is_random

__all__ = ["LEFT_OUT", "has_no_values", "is_repeatable", "may_draw"]

_MEMORY = "its elements are what the memory held before"
_DROPS = "it may draw random numbers inside, and torch does not mark it"
_ATOMIC = "on CUDA it adds in the order in which threads arrive"

# fmt: off
LEFT_OUT: Mapping[str, str] = MappingProxyType({
    # operator                        why it may give other bits
    "empty":                          _MEMORY,
    "empty_like":                     _MEMORY,
    "empty_strided":                  _MEMORY,
    "empty_permuted":                 _MEMORY,
    "new_empty":                      _MEMORY,
    "new_empty_strided":              _MEMORY,

    "dropout":                        _DROPS,
    "feature_dropout":                _DROPS,
    "alpha_dropout":                  _DROPS,
    "feature_alpha_dropout":          _DROPS,
    "rrelu":                          _DROPS,
    "lstm":                           _DROPS,
    "gru":                            _DROPS,
    "rnn_tanh":                       _DROPS,
    "rnn_relu":                       _DROPS,
    "_fused_sdp_choice":              _DROPS,
    "scaled_dot_product_attention":   _DROPS,

    "bincount":                       _ATOMIC,
    "histc":                          _ATOMIC,
    "index_add":                      _ATOMIC,
    "index_put":                      _ATOMIC,
    "index_reduce":                   _ATOMIC,
    "put":                            _ATOMIC,
    "scatter_add":                    _ATOMIC,
    "scatter_reduce":                 _ATOMIC,
    "cumsum":                         _ATOMIC,
    "_embedding_bag":                 _ATOMIC,
    "embedding_bag":                  _ATOMIC,
})
# fmt: on

_RESHAPE = frozenset({"set_", "resize_", "resize_as_", "requires_grad_"})
_PYTHON = ("_operator", "builtins", "math")
_TAGS = (
    torch.Tag.nondeterministic_seeded,
    torch.Tag.nondeterministic_bitwise,
    torch.Tag.data_dependent_output,  # it reads values on the host
    torch.Tag.inplace_view,  # it changes what other nodes say of their sizes
)


@cache
def is_repeatable(target: OpOverload) -> bool:
    """Whether *target* gives the same bits each time, with the same settings of torch.

    One that writes may do so to its first argument alone, which is its result.  Settings are the number of
    threads and the flags of the back ends, which a kernel may choose the order of a sum by.
    """
    name = _name_of(target)
    if target.namespace != "aten" or (target._schema.is_mutable and not _gives_what_it_writes(target)):
        return False
    return name.removesuffix("_") not in LEFT_OUT and not any(tag in target.tags for tag in _TAGS)


def has_no_values(target: object) -> bool:
    """Whether *target* gives memory as it is, which nobody has written to yet."""
    return isinstance(target, OpOverload) and LEFT_OUT.get(_name_of(target)) == _MEMORY


def may_draw(target: object) -> bool:
    """Whether *target* may draw from a random generator; of what is no operator of ATen nobody knows."""
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return getattr(target, "__module__", "") not in _PYTHON
    drops = LEFT_OUT.get(_name_of(target).removesuffix("_")) == _DROPS
    return drops or is_random(target)


def _name_of(target: OpOverload) -> str:
    name: str = target.name().removeprefix("aten::").partition(".")[0]
    return name


def _gives_what_it_writes(target: OpOverload) -> bool:
    """Whether *target* writes to its first argument, to no other, and gives that as it lies."""
    schema = target._schema
    written = [given.name for given in schema.arguments if given.alias_info and given.alias_info.is_write]
    name = schema.name.removeprefix("aten::")
    return written == [schema.arguments[0].name] and name.endswith("_") and name not in _RESHAPE
