"""The operators with any other policy: set a dtype, promote, banned, and cuDNN's RNN.

``REDISPATCHES`` belongs to ``FP32_APPEND_DTYPE``: the overload that is called instead.
"""

from collections.abc import Mapping
from types import MappingProxyType

from fxamp.policy.cast_policy import CastPolicy, OpRule
from fxamp.policy.table_rows import CPU, CUDA, GPU, GPU_MPS, rows

__all__ = ["OTHER", "REDISPATCHES"]

_SET = CastPolicy.FP32_SET_OPT_DTYPE
_APPEND = CastPolicy.FP32_APPEND_DTYPE
_PROMOTE = CastPolicy.PROMOTE

OTHER: tuple[OpRule, ...] = (
    # ---- dtype=float32 instead of a cast
    *rows(
        _SET, GPU, "a long sum; the kernel widens as it reads, so no cast is needed",
        "sum sum.dim_IntList cumsum",
    ),
    *rows(
        _SET, GPU, "a product of n factors leaves float16's range soon; the kernel widens as it reads",
        "prod prod.dim_int cumprod",
    ),
    *rows(
        _SET, GPU, "a sum of exp, which overflows float16 above 11.09; the kernel widens as it reads",
        "softmax.int log_softmax.int",
    ),
    *rows(
        _SET, GPU, "a long sum of squares or singular values; the kernel widens as it reads",
        "linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord",
    ),
    *rows(
        _APPEND, GPU, "a long sum of squares; this overload has no dtype argument, its sibling has",
        "norm.Scalar norm.ScalarOpt_dim",
    ),

    # ---- arguments that must agree
    *rows(
        _PROMOTE, GPU_MPS, "pointwise with several tensors: safe in any dtype that they share",
        "addcdiv addcmul atan2 cross",
    ),
    *rows(
        _PROMOTE, GPU_MPS, "a kernel that takes one dtype: a product that stays wide if an input is",
        "dot tensordot bilinear",
    ),
    *rows(
        _PROMOTE, GPU, "a kernel that takes one dtype: a product that stays wide if an input is",
        "vdot",
    ),
    *rows(
        _PROMOTE, GPU_MPS, "the image and the grid must agree; a float32 grid keeps its coordinates",
        "grid_sampler",
    ),
    *rows(
        _PROMOTE, GPU_MPS, "what is written must have the dtype of what it is written to",
        "index_put scatter_add",
    ),
    *rows(
        _PROMOTE, CPU, "one output buffer: what is written into it must agree",
        "cat stack index_copy",
    ),

    # ---- special
    *rows(
        CastPolicy.BANNED, GPU, "log of a probability: float16 rounds it to 0 or 1; use ..._with_logits",
        "binary_cross_entropy",
    ),
    *rows(
        CastPolicy.CUDNN_RNN, CUDA, "GEMMs on tensor cores; cuDNN wants all weights in one flat buffer",
        "_cudnn_rnn",
    ),
)  # fmt: skip

REDISPATCHES: Mapping[str, str] = MappingProxyType(
    {
        "aten::norm.Scalar": "aten::norm.ScalarOpt_dtype",
        "aten::norm.ScalarOpt_dim": "aten::norm.ScalarOpt_dim_dtype",
        "aten::norm.names_ScalarOpt_dim": "aten::norm.names_ScalarOpt_dim_dtype",
    }
)
"""The overload with a ``dtype`` argument that stands in for each ``FP32_APPEND_DTYPE`` operator."""
