"""Kernels that consult autocast themselves, below autograd.

Their implementation calls operators with a rule through the dispatcher, out of the graph's sight.  No cast
on the outer operator can express what happens inside, so such an operator is run inside a real autocast
region and reported.  Rows were found by running every operator of torch's OpInfo database with and
without a region around it (``tests/conformance/test_op_db.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["REENTRANT"]

# fmt: off
_ROWS = (
    # operator                            what its kernel calls
    ("aten::_transformer_encoder_layer_fwd", "linear layers and _native_multi_head_attention"),
    ("aten::linalg_pinv.atol_rtol_tensor",   "matmul, on the factors of the decomposition"),
    ("aten::linalg_pinv.atol_rtol_float",    "linalg_pinv.atol_rtol_tensor"),
    ("aten::linalg_matrix_exp",              "matmul, in the Taylor polynomials"),
    ("aten::_trilinear",                     "bmm"),
    ("aten::mvlgamma",                       "stack or sum over the shifted arguments"),
    ("aten::ldexp.Tensor",                   "pow, of two"),
    ("aten::_safe_softmax",                  "softmax"),
    ("aten::multinomial",                    "div and argmax on exponential samples"),
    ("aten::repeat",                         "cat-like copies through unfold"),
    ("aten::roll",                           "cat of the two pieces"),
    ("aten::_linalg_det",                    "prod of the diagonal"),
    ("aten::_sparse_addmm",                  "addmm, which casts the sparse matrix too"),
    ("aten::linalg_polar",                   "linalg_svd, which CPU autocast runs in float32"),
    ("aten::_linalg_slogdet",                "log and sum of the diagonal"),
)
# fmt: on
REENTRANT: Mapping[str, str] = MappingProxyType(dict(_ROWS))
"""By operator name: what the kernel calls that autocast intercepts."""
