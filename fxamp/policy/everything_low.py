"""The rules of ``Policy.everything_low``: low precision, but for norms and losses."""

from __future__ import annotations

from collections.abc import Mapping

from fxamp.policy.cast_policy import CastPolicy, OpRule

__all__ = ["lowered"]

_NORMS = "layer_norm native_layer_norm group_norm native_group_norm rms_norm renorm norm linalg_vector_norm"
_LOSSES = """
    binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy_loss ctc_loss
    hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss
    multilabel_margin_loss nll_loss nll_loss2d nll_loss_nd poisson_nll_loss smooth_l1_loss soft_margin_loss
    triplet_margin_loss gaussian_nll_loss
"""
_ADDED = "layer_norm group_norm rms_norm cross_entropy_loss nll_loss_nd mse_loss l1_loss kl_div huber_loss"
_KEPT = frozenset(f"aten::{name}" for name in f"{_NORMS} {_LOSSES}".split())
_LOW_WHY = "everything is low, but for norms and losses"
_KEPT_WHY = "a norm or a loss: a long sum, kept in float32 while everything else is low"
_WIDE = (CastPolicy.FP32, CastPolicy.FP32_SET_OPT_DTYPE, CastPolicy.FP32_APPEND_DTYPE)


def lowered(rules: Mapping[str, OpRule], device_type: str) -> dict[str, OpRule]:
    """*rules*, with low precision for every operator that had float32 and is neither norm nor loss."""
    found = {}
    for op, rule in rules.items():
        is_wide, is_kept = rule.cast in _WIDE, op.partition(".")[0] in _KEPT
        low = OpRule(op, CastPolicy.LOWER_PRECISION_FP, frozenset({device_type}), _LOW_WHY)
        found[op] = low if is_wide and not is_kept else rule
    for name in _ADDED.split():
        row = OpRule(f"aten::{name}", CastPolicy.FP32, frozenset({device_type}), _KEPT_WHY)
        found.setdefault(row.op, row)
    return found
