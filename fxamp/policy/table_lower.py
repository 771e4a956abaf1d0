"""The operators that run in the low precision dtype: matrix products in all their forms.

They are the reason to use autocast.  A product of two float16 or bfloat16 numbers is exact in
float32 (22 and 16 significand bits of 24), matrix units add the products up in float32, and only
the result is rounded; so half the bytes and several times the throughput cost one rounding.
"""

from fxamp.policy.cast_policy import CastPolicy, OpRule
from fxamp.policy.table_rows import ALL, CPU, CUDA, GPU, GPU_MPS, MPS, rows

__all__ = ["LOWER"]

_LOWER = CastPolicy.LOWER_PRECISION_FP

LOWER: tuple[OpRule, ...] = (
    # ---- matrix products
    *rows(
        _LOWER, ALL, "GEMM on matrix units, float32 accumulation",
        "mm addmm bmm addbmm baddbmm matmul linear",
    ),
    *rows(
        _LOWER, GPU_MPS, "a GEMM with one side a vector, or a chain of GEMMs",
        "mv addmv addr chain_matmul linalg_multi_dot einsum",
    ),
    *rows(
        _LOWER, GPU | CPU, "batched dot products, the inner step of a GEMM",
        "linalg_vecdot",
    ),
    *rows(
        _LOWER, CPU, "GEMM with the activation fused behind it",
        "_addmm_activation",
    ),

    # ---- convolutions
    *rows(
        _LOWER, ALL, "convolution as an implicit GEMM, float32 accumulation",
        "conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input _convolution.deprecated",
    ),
    *rows(
        _LOWER, GPU | CPU, "convolution as an implicit GEMM; MPS has it under float32",
        "conv_transpose3d.input",
    ),
    *rows(
        _LOWER, GPU_MPS, "the convolution that conv1d to conv_transpose3d share, called directly",
        "convolution _convolution",
    ),
    *rows(
        _LOWER, CPU, "padding given as a word; elsewhere a composite of convolution",
        "conv1d.padding conv2d.padding conv3d.padding",
    ),
    *rows(
        _LOWER, CUDA, "cuDNN's own convolution entry points, called directly",
        "cudnn_convolution cudnn_convolution_transpose",
    ),
    *rows(
        _LOWER, MPS, "Metal's own convolution entry point, called directly",
        "_mps_convolution",
    ),

    # ---- attention
    *rows(
        _LOWER, ALL, "two GEMMs around a softmax that the kernel keeps in float32",
        "scaled_dot_product_attention",
    ),
    *rows(
        _LOWER, GPU, "the fused attention kernel, which takes 16-bit inputs only",
        "_scaled_dot_product_flash_attention",
    ),
    *rows(
        _LOWER, CPU, "the inference path of nn.MultiheadAttention: its projections are GEMMs",
        "_native_multi_head_attention",
    ),

    # ---- recurrent cells
    *rows(
        _LOWER, GPU_MPS, "two GEMMs a step; bounded activations behind them",
        "lstm_cell",
    ),
    *rows(
        _LOWER, GPU, "two GEMMs a step; bounded activations behind them",
        "gru_cell rnn_tanh_cell rnn_relu_cell",
    ),
    *rows(
        _LOWER, GPU, "the pointwise half of a cell; its inputs are the outputs of the GEMMs",
        "_thnn_fused_lstm_cell _thnn_fused_gru_cell",
    ),
    *rows(
        _LOWER, CPU, "a whole recurrent layer in oneDNN: GEMMs on matrix units",
        "mkldnn_rnn_layer",
    ),

    # ---- one that is not a product of matrices
    *rows(
        _LOWER, ALL, "a float32 slope must not widen the output of the convolution before it",
        "prelu",
    ),
)  # fmt: skip
