"""How the table is written down: rows that share a reason are one group.

The table files list groups; each operator in a group becomes one ``OpRule``.  Operators are
written without the ``aten::`` that all of them have.
"""

from fxamp.policy.cast_policy import CastPolicy, OpRule

__all__ = ["ALL", "CPU", "CUDA", "GPU", "GPU_MPS", "MPS", "rows"]

CUDA = frozenset({"cuda"})
CPU = frozenset({"cpu"})
MPS = frozenset({"mps"})
GPU = frozenset({"cuda", "xpu", "mtia"})
"""The device types that share torch's common list of autocast operators."""
GPU_MPS = GPU | MPS
ALL = GPU_MPS | CPU


def rows(cast: CastPolicy, devices: frozenset[str], why: str, operators: str) -> tuple[OpRule, ...]:
    """One row for each of the space-separated *operators*."""
    return tuple(OpRule(f"aten::{name}", cast, devices, why) for name in operators.split())
