"""Which operators give the same bits each time that they are given the same tensors.

An operator of ATen does if its schema says that it writes to nothing, if torch does not mark it as random, or
as one that reads values on the host, and if it is none of the few below.  Of an operator from
elsewhere nobody knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

import torch
from torch._ops import OpOverload

__all__ = ["LEFT_OUT", "is_repeatable"]

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

_TAGS = (
    torch.Tag.nondeterministic_seeded,
    torch.Tag.nondeterministic_bitwise,
    torch.Tag.data_dependent_output,  # it reads values on the host
)


@cache
def is_repeatable(target: OpOverload) -> bool:
    """Whether *target* writes to nothing and gives the same bits each time, with the same settings of torch.

    Settings are the number of threads and the flags of the back ends, which a kernel may choose the order of
    a sum by.
    """
    if target.namespace != "aten" or target._schema.is_mutable:
        return False
    name = target.name().removeprefix("aten::").partition(".")[0]
    return name not in LEFT_OUT and not any(tag in target.tags for tag in _TAGS)
