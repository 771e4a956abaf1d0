"""What an operator wants of its floating arguments, and the row that says so.

Two words are used throughout.  A tensor is *eligible* if it is floating and lives on the device
type of the autocast region; it is *castable* if it is eligible and not float64.  Integers,
booleans, complex numbers, float64 and tensors of other devices pass through every policy as they
are.  Casts are made right to left over the arguments; below a wrapper nothing autocasts again.

Source: ``aten/src/ATen/autocast_mode.h`` (``at::autocast::CastPolicy``, ``WrapFunction_``).
"""

from dataclasses import dataclass
from enum import Enum

__all__ = ["CastPolicy", "OpRule"]


class CastPolicy(Enum):
    """What autocast's wrapper does to an operator (names after ``at::autocast::CastPolicy``).

    - ``LOWER_PRECISION_FP``: casts every castable ``Tensor``, ``Tensor?`` and ``Tensor[]``
      argument, keyword arguments included, to the low precision dtype of the region.
    - ``FP32``: casts the same arguments to float32.
    - ``FP32_SET_OPT_DTYPE``: casts nothing.  If the first argument is castable and ``dtype`` is
      None, the operator gets ``dtype=torch.float32``; a ``dtype`` that is given stays.
    - ``FP32_APPEND_DTYPE``: casts nothing.  Calls the overload that has a ``dtype`` argument
      (``REDISPATCHES``), with float32 if the first argument is castable, else its own dtype.
    - ``PROMOTE``: starts from the low precision dtype and visits the ``Tensor`` and ``Tensor[]``
      arguments left to right, skipping what is not castable: a float32 makes the result float32,
      low precision keeps it, any other dtype raises.  Then casts every castable ``Tensor``,
      ``Tensor?`` and ``Tensor[]`` argument to the result.  ``Tensor?`` has no say in it, and
      ``Tensor?[]`` (the indices of ``index_put``) is neither visited nor cast.
    - ``BANNED``: raises, for every dtype.
    - ``CUDNN_RNN``: casts ``input``, ``hx`` and ``cx`` to **float16**, also in a bfloat16 region,
      and copies weights that are not float16 into one new flat float16 buffer, uncached.
    """

    LOWER_PRECISION_FP = "lower_precision_fp"
    FP32 = "fp32"
    FP32_SET_OPT_DTYPE = "fp32_set_opt_dtype"
    FP32_APPEND_DTYPE = "fp32_append_dtype"
    PROMOTE = "promote"
    BANNED = "banned"
    CUDNN_RNN = "cudnn_rnn"


@dataclass(frozen=True)
class OpRule:
    """One row of the table: an operator overload, its cast policy, where, and why.

    Attributes:
        op: The overload's name as ``OpOverload.name()`` gives it: ``aten::conv2d.padding``.
        cast: What the wrapper does to the arguments.
        devices: The device types on which the row holds.
        why: The reason for the row.
    """

    op: str
    cast: CastPolicy
    devices: frozenset[str]
    why: str
