"""Kernels that consult autocast themselves, below autograd.

Their implementation calls operators with a rule through the dispatcher, out of the graph's sight.  No cast
on the outer operator can express what happens inside, so such an operator is run inside a real autocast
region and reported.  Rows were found by watching what each operator of torch's OpInfo database calls from
inside its kernel with a floating argument (``tests/conformance/test_reentrant.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["REENTRANT"]

# fmt: off
_ROWS = (
    # operator                                      what its kernel calls, on floating tensors
    ("aten::_transformer_encoder_layer_fwd",        "_native_multi_head_attention, addmm, layer_norm ..."),
    ("aten::linalg_pinv.atol_rtol_tensor",          "svd or linalg_eigh, reciprocal, matmul"),
    ("aten::linalg_matrix_exp",                     "sum, log2, pow, bmm, cat, in the Taylor polynomials"),
    ("aten::linalg_polar",                          "linalg_svd, matmul"),
    ("aten::_linalg_det",                           "prod, of the diagonal"),
    ("aten::_linalg_slogdet",                       "prod, of the signs of the diagonal"),
    ("aten::affine_grid_generator",                 "bmm, of the grid with the transforms"),
    ("aten::_trilinear",                            "bmm, sum"),
    ("aten::_sparse_addmm",                         "addmm, which casts the sparse matrix too"),
    ("aten::_safe_softmax",                         "softmax"),
    ("aten::ldexp.Tensor",                          "pow, of two"),
    ("aten::ldexp_",                                "pow, of two"),
    ("aten::ldexp.out",                             "pow, of two"),
    ("aten::mvlgamma",                              "sum, over the shifted arguments"),
    ("aten::mvlgamma_",                             "sum, over the shifted arguments"),
    ("aten::renorm_",                               "linalg_vector_norm"),
    ("aten::multinomial",                           "sum, of the probabilities, to check them"),
    ("aten::histogram.bin_ct",                      "sum, for a density"),
    ("aten::histogram.bins_tensor",                 "sum, for a density"),
    ("aten::_histogramdd_from_bin_cts",             "sum, for a density"),
    ("aten::_histogramdd_from_bin_tensors",         "sum, for a density"),
    ("aten::_unsafe_masked_index_put_accumulate",   "index_put"),
    ("aten::roll",                                  "cat, of the two pieces"),
    ("aten::_chunk_cat",                            "cat"),
    ("aten::isin.Tensor_Tensor",                    "cat, if it sorts"),
    ("aten::unique_consecutive",                    "stack, of the rows that are left"),
    ("aten::unique_dim",                            "stack, of the rows that are left"),
)
# fmt: on
REENTRANT: Mapping[str, str] = MappingProxyType(dict(_ROWS))
"""By operator name: what the kernel calls that autocast intercepts."""
