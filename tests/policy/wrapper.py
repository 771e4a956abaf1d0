"""Autocast's wrapper as an executable sentence: what each cast policy does to the arguments.

The counterpart of ``probe``: that one asks the dispatcher, this one says what the answer is if the
row in the table is right.
"""

import torch
from torch._ops import OpOverload

from fxamp.policy import REDISPATCHES, CastPolicy, OpRule
from tests.policy.probe import Argument, Observed

__all__ = ["expected"]


def expected(
    rule: OpRule, op: OpOverload, tensors: list[Argument], device: str, low: torch.dtype
) -> Observed:
    """What the wrapper does to *op* by its rule; of a ``message``, the first words."""
    own, first = op.name(), tensors[0]
    if device not in {argument.device for argument in tensors}:
        return Observed((), own)  # no tensor brings the key along: the wrapper does not run
    match rule.cast:
        case CastPolicy.LOWER_PRECISION_FP:
            return Observed(_casts(tensors, device, low), own)
        case CastPolicy.FP32:
            return Observed(_casts(tensors, device, torch.float32), own)
        case CastPolicy.FP32_SET_OPT_DTYPE:
            return Observed((), own, torch.float32 if _castable(first, device) else None)
        case CastPolicy.FP32_APPEND_DTYPE:
            wide = torch.float32 if _castable(first, device) else first.dtype
            return Observed((), REDISPATCHES[own], wide)
        case CastPolicy.PROMOTE:
            target = _promoted(tensors, device, low)
            if target is None:
                return Observed(message="Unexpected floating ScalarType in at::autocast::prioritize")
            return Observed(_casts(tensors, device, target), own)
        case CastPolicy.BANNED:
            return Observed(
                message="torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe"
            )
        case CastPolicy.CUDNN_RNN:
            states = [argument for argument in tensors if argument.name in {"input", "hx", "cx"}]
            return Observed(_casts(states, device, torch.float16), own)


def _castable(argument: Argument, device: str) -> bool:
    return argument.device == device and argument.dtype.is_floating_point and argument.dtype != torch.float64


def _casts(tensors: list[Argument], device: str, target: torch.dtype) -> tuple[tuple[str, torch.dtype], ...]:
    """Right to left over the arguments, left to right within a list."""
    last = {argument.name.partition("[")[0]: i for i, argument in enumerate(tensors)}
    order = sorted(tensors, key=lambda argument: -last[argument.name.partition("[")[0]])
    return tuple(
        (argument.name, target)
        for argument in order
        if _castable(argument, device)
        and argument.dtype != target
        and argument.kind != "List[Optional[Tensor]]"
    )


def _promoted(tensors: list[Argument], device: str, low: torch.dtype) -> torch.dtype | None:
    """The dtype that the arguments are cast to; None if the wrapper refuses them."""
    result = low
    for argument in tensors:
        if "Optional" in argument.kind or not _castable(argument, device):
            continue
        if torch.float32 in (result, argument.dtype):
            result = torch.float32
        elif argument.dtype != low:
            return None
    return result
