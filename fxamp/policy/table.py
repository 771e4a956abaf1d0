"""The table: every ATen overload that autocast intercepts, on every device type.

It is a superset over torch 2.11 to 2.15 and over builds; ``Policy.native`` keeps what the
installed dispatcher registers.  An overload that is treated differently on different device
types has one row for each treatment, and no device type twice.

===================  =====================================================
``table_lower``      low precision: matrix products in all their forms
``table_fp32``       float32 by a cast
``table_cpu``        float32 by a cast, on the CPU alone
``table_other``      ``dtype=float32``, promote, banned, cuDNN's RNN
``table_names``      the overloads with named dimensions of older versions
===================  =====================================================
"""

from fxamp.policy.cast_policy import OpRule
from fxamp.policy.table_cpu import CPU_FP32
from fxamp.policy.table_fp32 import FP32
from fxamp.policy.table_lower import LOWER
from fxamp.policy.table_names import NAMED
from fxamp.policy.table_other import OTHER, REDISPATCHES

__all__ = ["REDISPATCHES", "RULES"]

RULES: tuple[OpRule, ...] = (*LOWER, *FP32, *CPU_FP32, *OTHER, *NAMED)
"""All rows, in the order in which the table files list them."""
