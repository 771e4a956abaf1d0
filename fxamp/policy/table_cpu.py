"""The operators that run in float32 on the CPU alone: its list is a different one.

Most of it is there because the libraries below (LAPACK, MKL and pocketfft) have no 16-bit
routines.  The CPU in turn has no policy for ``sum``, ``softmax``, ``layer_norm``, ``exp`` and
``pow``: its bfloat16 kernels compute in float32 inside, and bfloat16 has float32's range.
"""

from fxamp.policy.cast_policy import CastPolicy, OpRule
from fxamp.policy.table_rows import CPU, CUDA, rows

__all__ = ["CPU_FP32"]

_FP32 = CastPolicy.FP32

CPU_FP32: tuple[OpRule, ...] = (
    # ---- linear algebra
    *rows(
        _FP32, CPU, "LAPACK has no 16-bit routines: a factorisation",
        "cholesky linalg_cholesky linalg_cholesky_ex qr linalg_qr geqrf orgqr ormqr "
        "linalg_householder_product _lu_with_info",
    ),
    *rows(
        _FP32, CPU, "LAPACK has no 16-bit routines: eigenvalues and singular values",
        "linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh svd linalg_svd linalg_svdvals "
        "linalg_cond linalg_cond.p_str",
    ),
    *rows(
        _FP32, CPU, "LAPACK has no 16-bit routines: inverses and systems of equations",
        "inverse linalg_inv linalg_inv_ex pinverse linalg_solve linalg_lstsq linalg_tensorinv "
        "linalg_tensorsolve lu_solve triangular_solve cholesky_solve cholesky_inverse",
    ),
    *rows(
        _FP32, CPU, "a count of singular values above a threshold near the dtype's epsilon",
        "linalg_matrix_rank linalg_matrix_rank.tol_tensor linalg_matrix_rank.atol_rtol_tensor "
        "linalg_matrix_rank.atol_rtol_float",
    ),
    *rows(
        _FP32, CPU | CUDA, "LAPACK and cuSOLVER have no 16-bit routines: an eigendecomposition",
        "linalg_matrix_sqrth",
    ),
    *rows(
        _FP32, CPU, "a sum over the diagonal",
        "trace",
    ),

    # ---- Fourier transforms and complex numbers
    *rows(
        _FP32, CPU, "the CPU's FFT libraries take float32 and float64 only",
        "fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn fft_ifftn fft_rfft fft_irfft fft_rfft2 "
        "fft_irfft2 fft_rfftn fft_irfftn fft_hfft fft_ihfft stft stft.center",
    ),
    *rows(
        _FP32, CPU, "its result is complex, and most complex kernels want float32 parts or wider",
        "polar view_as_complex",
    ),

    # ---- losses
    *rows(
        _FP32, CPU, "a loss of logits: log of a sum of exp, then a mean over the batch",
        "cross_entropy_loss",
    ),
    *rows(
        _FP32, CPU, "a loss of probabilities: log overflows near 0, then a mean over the batch",
        "binary_cross_entropy",
    ),
    *rows(
        _FP32, CPU, "a sum over all alignments of products of probabilities, in log space",
        "ctc_loss.IntList ctc_loss.Tensor",
    ),
    *rows(
        _FP32, CPU, "a loss of margins, summed over every pair",
        "multilabel_margin_loss_forward",
    ),

    # ---- reductions
    *rows(
        _FP32, CPU, "a product of n factors leaves float16's range soon; casts even if dtype is given",
        "prod prod.dim_int",
    ),
    *rows(
        _FP32, CPU, "sorts and interpolates; takes float32 and float64 only",
        "quantile quantile.scalar nanquantile nanquantile.scalar",
    ),

    # ---- pooling, padding, sampling
    *rows(
        _FP32, CPU, "3-d pooling: a large window, and a gradient that adds overlaps up",
        "avg_pool3d max_pool3d adaptive_avg_pool3d adaptive_max_pool3d fractional_max_pool3d max_unpool3d",
    ),
    *rows(
        _FP32, CPU, "pooling by indices: a gradient that adds overlaps up",
        "fractional_max_pool2d max_unpool2d",
    ),
    *rows(
        _FP32, CPU, "a copy forward; the gradient adds up the copies of each border element",
        "reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d",
    ),
    *rows(
        _FP32, CPU, "coordinates: eleven bits cannot address a pixel of a large image",
        "grid_sampler grid_sampler_2d _grid_sampler_2d_cpu_fallback grid_sampler_3d",
    ),

    # ---- quantisation
    *rows(
        _FP32, CPU, "rounds to a grid of its own, whose scale is a float32 number",
        "fake_quantize_per_tensor_affine",
    ),
)  # fmt: skip
