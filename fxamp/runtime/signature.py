"""What two calls must have in common to be served by the same programs."""

from __future__ import annotations

from typing import Any

import torch
from torch import get_default_dtype, is_grad_enabled, is_inference_mode_enabled

from fxamp.capture.structure import Spec
from fxamp.ir.regions import Region
from fxamp.runtime.cells import Cells
from fxamp.runtime.likeness import describe
from fxamp.runtime.program import Program
from fxamp.runtime.route import Route, Routes
from fxamp.runtime.watch import ModuleWatch, tensor_check

__all__ = ["Latest", "are_plain", "signature"]

_MOST_GATHERINGS = 16  # a model that puts new objects into its attributes in each call is read each time


def signature(spec: Spec, leaves: list[torch.Tensor], region: Region, watch: ModuleWatch | None) -> Any:
    """Everything that selects a program, but sizes, which its shape guard tests; hashable."""
    return (
        spec,
        tuple([describe(leaf) for leaf in leaves]),
        _aliases(leaves) if len(leaves) > 1 else None,
        is_grad_enabled(),
        is_inference_mode_enabled(),
        region,
        watch.training() if watch is not None else (),
        watch.hooks() if watch is not None else (),
        get_default_dtype(),  # of the tensors that the model makes of numbers
    )


def are_plain(args: tuple[Any, ...]) -> bool:
    """Whether *args* are tensors without gradient, all different."""
    return len(set(map(id, args))) == len(args) and all(
        isinstance(arg, torch.Tensor) and not arg.requires_grad for arg in args
    )


def _aliases(leaves: list[torch.Tensor]) -> Any:
    """Which inputs are one and the same tensor."""
    first: dict[int, int] = {}
    return tuple([first.setdefault(id(leaf), index) for index, leaf in enumerate(leaves)])


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
        routes: Routes | None,
    ) -> None:
        self.program, self.key, self.routes = program, key, routes
        self._count = len(args)
        self._alike = tensor_check(args)
        self._region, self._watch = region, watch
        self._modes = is_grad_enabled(), is_inference_mode_enabled(), get_default_dtype()
        self._training = watch.training() if watch is not None else ()
        self._hooks = watch.hooks() if watch is not None else ()
        self._kept: tuple[Cells, Route | None] | None = None  # one object: other threads change it
        self._read = program.tensors_of_same
        self._gathered = 0

    def is_like(self, args: tuple[Any, ...], region: Region) -> bool:
        """Whether *args* and *region*, and the modes of torch, are as they were."""
        if len(args) != self._count or (self._count > 1 and len(set(map(id, args))) != self._count):
            return False
        if region is not self._region and region != self._region:
            return False
        try:
            if not self._alike(*args):
                return False
        except TypeError:  # not a tensor
            return False
        modes = is_grad_enabled(), is_inference_mode_enabled(), get_default_dtype()
        return modes == self._modes

    def check(self) -> tuple[list[torch.Tensor] | None, Route | None]:
        """Look whether the model is as it was.

        Returns:
            Its tensors that the program reads now, ``None`` if it is not as it was; and the route for all of
            which the attributes are as they were, if that is known.
        """
        route = self.routes.current if self.routes is not None else None
        kept = self._kept
        if kept is not None and kept[1] is route and kept[0].are_same():
            return self._read(), route
        self._kept = None
        watch = self._watch
        if watch is not None and not (
            watch.intact() and watch.training() == self._training and watch.hooks() == self._hooks
        ):
            return None, None
        tensors = self.program.tensors()
        if tensors is not None and self._gathered < _MOST_GATHERINGS:
            self._gather(route)
        return tensors, None

    def _gather(self, route: Route | None) -> None:
        """Keep the very objects that all of this was read from, the next time that is enough."""
        self._gathered += 1
        later = route.path[1:] if route is not None else ()
        if not all(program.holds() for program in later):
            return
        cells = Cells()
        if self._watch is not None:
            self._watch.gather(cells)
        for program in (self.program, *later):
            program.gather(cells)
        self._kept = cells.close(), route
