"""A float32 weight of which only the low precision copy is left.

Code that looks at such a weight sees the float32 tensor that the model was written for: its class, dtype,
sizes, strides and device.  So a model is captured with it as with the weight itself.  There are no float32
values any more, so an operator that needs them raises instead of giving other bits; what is loaded is
rounded.  A cast to the dtype that it is stored in is a copy of what is stored, with which Python that runs
eagerly under autocast does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.autograd.graph import increment_version

from fxamp.errors import FrozenError

__all__ = ["RoundedWeight"]

_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class RoundedWeight(torch.Tensor):
    """A float32 parameter that stores its values in *low*.

    Args:
        low: The rounded values, float16 or bfloat16, any shape.
        requires_grad: Whether the parameter did, which decides what eager autocast keeps of it.

    Attributes:
        low: The same tensor.

    Raises:
        FrozenError: Its float32 values are asked for.
    """

    low: torch.Tensor
    _is_param = True  # what isinstance(weight, nn.Parameter) asks
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, low: torch.Tensor, *, requires_grad: bool = False) -> RoundedWeight:  # noqa: D102, PYI034
        weight: RoundedWeight = torch.Tensor._make_wrapper_subclass(
            cls,
            low.shape,
            strides=low.stride(),
            dtype=torch.float32,
            device=low.device,
            requires_grad=requires_grad,
        )
        weight.low = low
        return weight

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Make an alias, cast, or round what is copied into the weight; nothing else can be done with it."""
        if func in _ALIASES:
            return RoundedWeight(args[0].low)
        if func is torch.ops.aten._to_copy.default and kwargs == {"dtype": args[0].low.dtype}:
            return args[0].low.clone()
        if func is torch.ops.aten.copy_.default and not isinstance(args[1], RoundedWeight):
            args[0].low.copy_(args[1].to(torch.float32))  # by way of float32, as in the model
            increment_version(args[0].low)  # below autograd, which does it else
            return args[0]
        raise FrozenError(
            f"{func.name()} needs a float32 weight of which only the low precision copy is kept\n"
            "  freeze again with an example that runs this code:  fxamp.freeze(amp, example_args)"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> RoundedWeight:
        if id(self) not in memo:
            memo[id(self)] = RoundedWeight(self.low.clone(), requires_grad=self.requires_grad)
        copied: RoundedWeight = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuilt, (self.low, self.requires_grad)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RoundedWeight({tuple(self.shape)}, stored as {self.low.dtype})"


def _rebuilt(low: torch.Tensor, requires_grad: bool) -> RoundedWeight:  # noqa: FBT001
    return RoundedWeight(low, requires_grad=requires_grad)
