"""What two calls must have in common to be served by the same programs."""

from __future__ import annotations

from typing import Any

import torch

from fxamp.capture.structure import Spec
from fxamp.ir.regions import Region
from fxamp.runtime.program import Program
from fxamp.runtime.watch import ModuleWatch, tensor_check

__all__ = ["Latest", "are_plain", "describe", "signature"]


def signature(spec: Spec, leaves: list[torch.Tensor], region: Region, watch: ModuleWatch | None) -> Any:
    """Everything that selects a program, but sizes, which its shape guard tests; hashable."""
    return (
        spec,
        tuple([describe(leaf) for leaf in leaves]),
        _aliases(leaves) if len(leaves) > 1 else None,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        region,
        watch.training() if watch is not None else (),
        watch.hooks() if watch is not None else (),
        torch.get_default_dtype(),  # of the tensors that the model makes of numbers
    )


def are_plain(args: tuple[Any, ...]) -> bool:
    """Whether *args* are tensors without gradient, all different."""
    return len(set(map(id, args))) == len(args) and all(
        isinstance(arg, torch.Tensor) and not arg.requires_grad for arg in args
    )


def describe(tensor: torch.Tensor) -> Any:
    """What a program must know of an input besides its sizes."""
    requires_grad = tensor.requires_grad
    return (
        tensor.dtype,
        tensor.device,
        requires_grad and (tensor.is_leaf and not tensor._is_view(), True),
        tensor.dim(),
        _layout(tensor),
        type(tensor),
    )


def _layout(tensor: torch.Tensor) -> Any:
    if tensor.layout is not torch.strided:
        return tensor.layout
    if tensor.is_contiguous():
        return True
    strides = tensor.stride()
    return tuple(sorted(range(len(strides)), key=strides.__getitem__, reverse=True))


def _aliases(leaves: list[torch.Tensor]) -> Any:
    """Which inputs are one and the same tensor."""
    first: dict[int, int] = {}
    return tuple([first.setdefault(id(leaf), index) for index, leaf in enumerate(leaves)])


def _modes() -> tuple[object, ...]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()


class Latest:
    """The latest call, if its arguments were plain: a quick test whether the next is served by its program.

    The test is stricter than signature and shape guard, it wants the same sizes and strides; but it is made
    in C++.  Nearly all calls of a training or serving loop pass it.
    """

    def __init__(
        self,
        args: tuple[torch.Tensor, ...],
        region: Region,
        watch: ModuleWatch | None,
        program: Program,
        key: Any,
    ) -> None:
        self.program, self.key = program, key
        self._count = len(args)
        self._alike = tensor_check(args)
        self._region, self._watch = region, watch
        self._modes = _modes()
        self._training = watch.training() if watch is not None else ()
        self._hooks = watch.hooks() if watch is not None else ()

    def is_like(self, args: tuple[Any, ...], region: Region) -> bool:
        """Whether a call with *args* in *region* is served by the same program."""
        if len(args) != self._count or (self._count > 1 and len(set(map(id, args))) != self._count):
            return False
        if region is not self._region and region != self._region:
            return False
        try:
            if not self._alike(*args):
                return False
        except TypeError:  # not a tensor
            return False
        if _modes() != self._modes:
            return False
        watch = self._watch
        return watch is None or (
            watch.intact() and watch.training() == self._training and watch.hooks() == self._hooks
        )
