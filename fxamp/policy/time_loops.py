"""Recurrent operators that are loops over time in C++, one small step after the other.

Written out, a sequence of 200 steps is 3,000 operators, for that length alone.  As one operator it has any
length, and runs as fast as in eager autocast.  So it stays one, inside of a real region: its state is cast
anew in every step, which no cast outside can express.  What it is given once, it is given cast: its weights
and its input, as far as eager autocast casts them once or nobody can tell.

``lstm.input`` is here for where oneDNN does not have it; ``fxamp/capture/time_loops.py`` says where.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from fxamp.policy.cast_policy import CastPolicy, OpRule

__all__ = ["TIME_LOOPS"]

# fmt: off
_ROWS = (
    # operator           what a step calls
    ("aten::gru",        "linear on the weights, sigmoid and tanh on the gates, the new state"),
    ("aten::lstm",       "linear on the weights, sigmoid and tanh on the gates, the new state"),
    ("aten::rnn_tanh",   "linear on the weights, and tanh"),
    ("aten::rnn_relu",   "linear on the weights, and relu"),
)
# fmt: on
TIME_LOOPS: Mapping[str, OpRule] = MappingProxyType(
    {
        f"{name}.{overload}": OpRule(
            f"{name}.{overload}",
            CastPolicy.LOWER_PRECISION_FP,
            frozenset({"cpu"}),
            f"a loop over time: {why}",
        )
        for name, why in _ROWS
        for overload in ("input", "data")
    }
)
"""By overload, what stands for a rule: its weights are cast before the loop."""
