"""What an operator does with a number that it is given, which decides what is lost if the dtype lacks it.

=========  ==========================================  ==============================  =====================
role       the number                                  beyond the largest              becomes 0
=========  ==========================================  ==============================  =====================
FILL       is an element of the result                 Inf, or torch raises            0
ADDEND     is added                                    Inf                             adds nothing
FACTOR     is multiplied with, or divided by           Inf (or 0), NaN where it is 0   0 (or Inf)
BOUND      limits the result                           no limit, or torch raises       another limit
=========  ==========================================  ==============================  =====================

Numbers that kernels and runtimes keep in float32 whatever the dtype of the tensors have no row: the ``eps``
of norms, the scale of attention, probabilities.  Nor have comparisons, which torch makes exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from types import MappingProxyType

from torch._ops import OpOverload
from torch.fx import Node

from fxamp.ir.operators import arguments_in_order
from fxamp.ir.scalars import scalar_arguments

__all__ = ["Role", "arguments_with", "base_name", "numbers_of", "role_of"]


class Role(Enum):
    """What is done with a number."""

    FILL = "fill"
    ADDEND = "addend"
    FACTOR = "factor"
    BOUND = "bound"


_ROWS: Mapping[Role, str] = MappingProxyType(
    {
        Role.FILL: """
            full.fill_value new_full.fill_value full_like.fill_value fill.value scalar_tensor.s
            masked_fill.value index_fill.value scatter.value where.self where.other
            pad.value constant_pad_nd.value threshold.value
            nan_to_num.nan nan_to_num.posinf nan_to_num.neginf
        """,
        Role.ADDEND: """
            add.other sub.other subtract.other rsub.other pairwise_distance.eps
        """,
        Role.FACTOR: """
            mul.other multiply.other div.other divide.other true_divide.other
            add.alpha sub.alpha rsub.alpha addcmul.value addcdiv.value
            addmm.alpha addmm.beta addmv.alpha addmv.beta addr.alpha addr.beta
            addbmm.alpha addbmm.beta baddbmm.alpha baddbmm.beta
            leaky_relu.negative_slope
        """,
        Role.BOUND: """
            clamp.min clamp.max clip.min clip.max clamp_min.min clamp_max.max
            maximum.other minimum.other hardtanh.min_val hardtanh.max_val
            cosine_similarity.eps logit.eps
        """,
    }
)
_ROLES: Mapping[tuple[str, str], Role] = MappingProxyType(
    {
        (operator, argument): role
        for role, rows in _ROWS.items()
        for operator, _, argument in (row.partition(".") for row in rows.split())
    }
)


def base_name(operator: OpOverload) -> str:
    """The name without namespace and overload, in-place operators by that of the others: ``add``."""
    name: str = operator._schema.name.split("::")[-1]
    return name if name.startswith("__") else name.rstrip("_")


def role_of(operator: OpOverload, argument: str) -> Role | None:
    """The role of a number, or tensor of one, that is given as *argument*; ``None`` if it does not matter."""
    return _ROLES.get((base_name(operator), argument))


def numbers_of(node: Node) -> Iterator[tuple[str, float, Role]]:
    """The numbers that *node* is given and that matter: argument, value, role."""
    if not isinstance(node.target, OpOverload):
        return
    for argument, value in scalar_arguments(node.target, node.args, node.kwargs):
        role = role_of(node.target, argument)
        if role is not None:
            yield argument, value, role


def arguments_with(node: Node, value: Node) -> Iterator[str]:
    """The names of the arguments of *node* that *value* is given for."""
    if isinstance(node.target, OpOverload):
        yield from (argument.name for argument, given in arguments_in_order(node) if given is value)
