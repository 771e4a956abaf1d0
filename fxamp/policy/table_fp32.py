"""The operators that run in float32 on every device type, or on every one but the CPU.

They leave the range of float16 (largest 65504, smallest normal 6.1e-5) for ordinary inputs, or
add up so many terms that eleven (float16) or eight (bfloat16) significand bits are not enough.
The CPU's own list is in ``table_cpu.py``.
"""

from fxamp.policy.cast_policy import CastPolicy, OpRule
from fxamp.policy.table_rows import ALL, GPU, GPU_MPS, MPS, rows

__all__ = ["FP32"]

_FP32 = CastPolicy.FP32

FP32: tuple[OpRule, ...] = (
    # ---- pointwise
    *rows(
        _FP32, GPU_MPS, "exp overflows float16 above 11.09 = ln 65504",
        "exp expm1",
    ),
    *rows(
        _FP32, GPU_MPS, "grows like exp(x)/2: overflows float16 above 11.78",
        "cosh sinh",
    ),
    *rows(
        _FP32, GPU_MPS, "log(1 + exp(x)): the exp overflows float16 above 11.09",
        "softplus",
    ),
    *rows(
        _FP32, GPU_MPS, "the gradient 1/x overflows float16 below 1.5e-5, and log(0) is -inf",
        "log log2 log10",
    ),
    *rows(
        _FP32, GPU_MPS, "made for small x, which 1 + x in eleven bits would lose",
        "log1p",
    ),
    *rows(
        _FP32, GPU_MPS, "1/x overflows float16 below 1.5e-5",
        "reciprocal",
    ),
    *rows(
        _FP32, GPU_MPS, "the gradient x**-1.5 / 2 overflows float16 below 3.9e-4",
        "rsqrt",
    ),
    *rows(
        _FP32, GPU_MPS, "a square overflows float16 above 255.9",
        "pow.Tensor_Scalar pow.Scalar pow.Tensor_Tensor",
    ),
    *rows(
        _FP32, GPU_MPS, "infinite slope at -1 and 1, where float16 steps by 4.9e-4",
        "acos asin erfinv",
    ),
    *rows(
        _FP32, GPU_MPS, "infinite slope at odd multiples of pi/2",
        "tan",
    ),

    # ---- normalisation, norms and distances
    *rows(
        _FP32, GPU_MPS, "mean and variance: long sums, and squares that overflow float16 above 255.9",
        "layer_norm native_layer_norm group_norm",
    ),
    *rows(
        _FP32, GPU, "mean of squares: a long sum, and a square overflows float16 above 255.9",
        "rms_norm",
    ),
    *rows(
        _FP32, MPS, "mean and variance: long sums, and squares that overflow float16 above 255.9",
        "batch_norm",
    ),
    *rows(
        _FP32, GPU_MPS, "a long sum of squares or singular values",
        "frobenius_norm.dim nuclear_norm nuclear_norm.dim renorm",
    ),
    *rows(
        _FP32, ALL, "a sum of squared differences for each pair",
        "cdist",
    ),
    *rows(
        _FP32, GPU_MPS, "a sum of squared differences, or of squares beside a dot product",
        "dist pdist cosine_similarity",
    ),

    # ---- reductions
    *rows(
        _FP32, GPU_MPS, "a sum of exp, which overflows float16 above 11.09",
        "logsumexp",
    ),
    *rows(
        _FP32, MPS, "a long sum; MPS casts the input where CUDA sets dtype=float32",
        "sum sum.dim_IntList cumsum",
    ),
    *rows(
        _FP32, MPS, "a product of n factors leaves float16's range soon; MPS casts the input",
        "prod prod.dim_int cumprod",
    ),
    *rows(
        _FP32, MPS, "a sum of exp; MPS casts the input where CUDA sets dtype=float32",
        "softmax.int log_softmax.int",
    ),
    *rows(
        _FP32, MPS, "a long sum of squares; MPS casts the input where CUDA sets dtype=float32",
        "linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord",
    ),

    # ---- losses
    *rows(
        _FP32, ALL, "a loss of logits: log of a sum of exp, then a mean over the batch",
        "binary_cross_entropy_with_logits soft_margin_loss",
    ),
    *rows(
        _FP32, ALL, "a loss of log-probabilities, summed over the batch",
        "nll_loss nll_loss2d kl_div poisson_nll_loss",
    ),
    *rows(
        _FP32, ALL, "a loss of differences, squared or not, summed over every element",
        "mse_loss l1_loss smooth_l1_loss huber_loss",
    ),
    *rows(
        _FP32, ALL, "a loss of margins or distances, summed over every pair",
        "margin_ranking_loss multi_margin_loss multilabel_margin_loss hinge_embedding_loss "
        "cosine_embedding_loss triplet_margin_loss",
    ),

    # ---- interpolation
    *rows(
        _FP32, GPU, "neighbours blended by fractional weights; the gradient sums many outputs into one",
        "upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d "
        "upsample_bicubic2d _upsample_bicubic2d_aa",
    ),
    *rows(
        _FP32, GPU, "a copy forward; the gradient sums many outputs into one input",
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d "
        "_upsample_nearest_exact2d _upsample_nearest_exact3d",
    ),

    # ---- what one device type has alone
    *rows(
        _FP32, MPS, "MPS has it under float32; the other device types run it in low precision",
        "conv_transpose3d.input",
    ),
)  # fmt: skip
