"""The overloads that take the names of dimensions: torch 2.11 and 2.12 have them, 2.13 does not.

Each is treated as its sibling that takes numbers.
"""

from fxamp.policy.cast_policy import CastPolicy, OpRule
from fxamp.policy.table_rows import CPU, GPU, MPS, rows

__all__ = ["NAMED"]

NAMED: tuple[OpRule, ...] = (
    *rows(
        CastPolicy.FP32_SET_OPT_DTYPE, GPU, "a long sum or product, by the name of the dimension",
        "sum.dim_DimnameList cumsum.dimname prod.dim_Dimname cumprod.dimname",
    ),
    *rows(
        CastPolicy.FP32_SET_OPT_DTYPE, GPU, "a sum of exp, by the name of the dimension",
        "softmax.Dimname log_softmax.Dimname",
    ),
    *rows(
        CastPolicy.FP32_APPEND_DTYPE, GPU, "a long sum of squares, by the names of the dimensions",
        "norm.names_ScalarOpt_dim",
    ),
    *rows(
        CastPolicy.FP32, MPS, "a long sum or product, by the name of the dimension",
        "sum.dim_DimnameList cumsum.dimname cumprod.dimname",
    ),
    *rows(
        CastPolicy.FP32, MPS, "a sum of exp, by the name of the dimension",
        "softmax.Dimname log_softmax.Dimname",
    ),
    *rows(
        CastPolicy.FP32, CPU | MPS, "a product of n factors, by the name of the dimension",
        "prod.dim_Dimname",
    ),
    *rows(
        CastPolicy.PROMOTE, CPU, "what is written must have the dtype of what it is written to",
        "index_copy.dimname",
    ),
)  # fmt: skip
