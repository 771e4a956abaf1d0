"""The runner of one module: picks the program that serves a call, captures a new one, or runs eagerly.

A call's signature is the structure of its arguments, what autocast asks of each tensor, the training flags,
the gradient and inference mode and the state of autocast.  A program of the same signature serves the call
if its shape guard holds and the module's own tensors are as they were.  A call that cannot be captured is
run by the module's Python inside a real region, with every child module on a runner of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedTensorMixin

from fxamp.capture.structure import Spec, flatten
from fxamp.capture.symbols import Sizes
from fxamp.errors import CaptureError
from fxamp.ir.regions import Region, observe_region
from fxamp.policy import Policy
from fxamp.runtime.cast_scope import cast_scope, keep_cast
from fxamp.runtime.program import Program, build_program
from fxamp.runtime.shadow import shadow_of
from fxamp.runtime.watch import ModuleWatch, tensor_check

__all__ = ["Options", "Runner"]

_MOST_PROGRAMS = 64
_LEAF_SPEC: Spec = ("leaf",)
_ONE_TENSOR: Spec = (tuple, ((tuple, (_LEAF_SPEC,)), (dict, ())))


@dataclass(frozen=True)
class Options:
    """How a model is converted.

    Attributes:
        policy: Which operators are cast.
        sizes: Which sizes are symbolic; once a signature is seen with other sizes, all are.
        dynamic_shapes: The user's own choice of symbolic sizes, as for ``torch.export``.
    """

    policy: Policy
    sizes: Sizes = Sizes.LEADING
    dynamic_shapes: Any = None


class Runner:
    """Runs one module, or one function, as eager autocast would.

    Args:
        function: The user's module or function; never changed.
        path: Its dotted path in the converted model, ``""`` for the model itself.
        options: How it is converted.

    Attributes:
        children: The runners of the child modules, once the module has run eagerly.
        programs: What was captured, by signature.
        read_eagerly: Parameters (by ``id``) that eager code of the model uses; no program may keep a cast
            of one, since eager autocast keeps another and their gradients would be added up apart.
        failures: Why calls of a signature run eagerly.
    """

    def __init__(
        self, function: Callable[..., Any], path: str, options: Options, parent: Runner | None = None
    ) -> None:
        self.function, self.path, self.options = function, path, options
        self.read_eagerly: set[int] = parent.read_eagerly if parent is not None else set()
        self.children: dict[int, Runner] = {}
        self.programs: dict[Any, list[Program]] = {}
        self.failures: dict[Any, str] = {}
        self.last: Program | None = None
        self._latest: _Latest | None = None
        self._lock = threading.RLock()
        self._watch = ModuleWatch(function) if isinstance(function, nn.Module) else None

    # --- calls --------------------------------------------------------------------------------------

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        """The result of ``function(*args, **kwargs)`` in *region*."""
        latest = self._latest
        if latest and not kwargs and latest.is_like(args, region) and self._may_run(latest.program):
            tensors = latest.program.tensors()
            if tensors is not None:
                return latest.program.run(args, tensors)
        return self._call(args, kwargs, region)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        self._latest = None
        try:
            key, spec, leaves = self._sign(args, kwargs, region)
        except CaptureError as error:
            self.failures[None] = str(error)
            return self._run_eagerly(args, kwargs, region)
        program, tensors = self._find(key, leaves)
        if program is None:
            program = self._capture(key, spec, leaves, region)
            if program is None:
                return self._run_eagerly(args, kwargs, region)
            tensors = program.tensors()
            assert tensors is not None, "a fresh program does not fit the model it was captured from"
        if not self._may_run(program):
            self.failures[key] = "eager code outside of this module uses its weights too"
            return self._run_eagerly(args, kwargs, region)
        self.last = program
        if not kwargs and _are_plain(args):
            self._latest = _Latest(args, region, self._watch, program)
        return program.run(leaves, tensors)

    def _may_run(self, program: Program) -> bool:
        return not self.path or self.read_eagerly.isdisjoint(program.kept)

    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> None:
        """Capture the program for a call, if there is none yet, and do not run it."""
        self._latest = None
        key, spec, leaves = self._sign(args, kwargs, region)
        program, _ = self._find(key, leaves)
        self.last = program or self._capture(key, spec, leaves, region)

    def _sign(self, args: Any, kwargs: Any, region: Region) -> tuple[Any, Spec, list[torch.Tensor]]:
        if self._watch is not None and not self._watch.intact():
            self.forget()
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
            spec, leaves = _ONE_TENSOR, [args[0]]
        else:
            spec, leaves = flatten((args, kwargs))
        return self._signature(spec, leaves, region), spec, leaves

    def _find(self, key: Any, leaves: list[torch.Tensor]) -> tuple[Program | None, Any]:
        for program in self.programs.get(key, ()):
            if program.guard.holds(leaves):
                tensors = program.tensors()
                if tensors is not None:
                    return program, tensors
        return None, None

    def _signature(self, spec: Spec, leaves: list[torch.Tensor], region: Region) -> Any:
        watch = self._watch
        return (
            spec,
            tuple([_describe(leaf) for leaf in leaves]),
            _aliases(leaves) if len(leaves) > 1 else None,
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            region,
            watch.training() if watch is not None else (),
            watch.hooked() if watch is not None else False,
        )

    def _capture(self, key: Any, spec: Spec, leaves: list[torch.Tensor], region: Region) -> Program | None:
        with self._lock:
            program, _ = self._find(key, leaves)  # another thread may have been faster
            if program is not None:
                return program
            if key in self.failures or self._is_uninitialized():
                return None
            try:
                self._refuse_hooks()
                program = build_program(
                    self.function,
                    spec,
                    leaves,
                    region,
                    self.options.policy,
                    sizes=self._sizes(key),
                    dynamic_shapes=self.options.dynamic_shapes,
                    keep_cast=keep_cast if self.path else None,
                )
            except CaptureError as error:
                self.failures[key] = str(error)
                return None
            programs = self.programs.get(key, [])
            self.programs[key] = [program, *programs[: _MOST_PROGRAMS - 1]]
            return program

    def _sizes(self, key: Any) -> Sizes:
        fixed = self.options.sizes is Sizes.FIXED
        return Sizes.ALL if key in self.programs and not fixed else self.options.sizes

    def _refuse_hooks(self) -> None:
        if self._watch is not None and self._watch.hooked():
            raise CaptureError(f"hooks are registered on {self._watch.where_hooked()}")

    def _is_uninitialized(self) -> bool:
        """Whether a lazy module has not seen its first call, which creates its parameters."""
        if not isinstance(self.function, nn.Module):
            return False
        tensors = [*self.function.parameters(), *self.function.buffers()]
        return any(isinstance(tensor, UninitializedTensorMixin) for tensor in tensors)

    # --- eager pieces -------------------------------------------------------------------------------

    def _run_eagerly(self, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        if self.path:  # below the model: the region is there already
            return shadow_of(self.function, self)(*args, **kwargs)  # type: ignore[arg-type]
        with cast_scope(), region.context():
            if not isinstance(self.function, nn.Module) or self._is_uninitialized():
                return self.function(*args, **kwargs)
            return shadow_of(self.function, self)(*args, **kwargs)

    def call_child(self, child: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a child of an eager piece, on its own runner (the side of ``Host``)."""
        runner = self.children.get(id(child))
        if runner is None or runner.function is not child:
            full = f"{self.path}.{path}" if self.path else path
            runner = self.children.setdefault(id(child), Runner(child, full, self.options, self))
        return runner(args, kwargs, observe_region(self.options.policy.device_type))

    def read_parameter(self, parameter: nn.Parameter) -> None:
        """Note that eager code uses *parameter* (the side of ``Host``)."""
        self.read_eagerly.add(id(parameter))

    # --- what was decided ---------------------------------------------------------------------------

    def forget(self) -> None:
        """Drop what was captured: the module is not the one it was captured from."""
        with self._lock:
            self.programs, self.failures, self.children = {}, {}, {}
            self.last, self._latest = None, None
            if isinstance(self.function, nn.Module):
                self._watch = ModuleWatch(self.function)

    def tree(self) -> list[Runner]:
        """This runner and those of all eager pieces below it."""
        return [self, *(below for child in list(self.children.values()) for below in child.tree())]


def _are_plain(args: tuple[Any, ...]) -> bool:
    """Whether *args* are tensors without gradient, all different."""
    return len(set(map(id, args))) == len(args) and all(
        isinstance(arg, torch.Tensor) and not arg.requires_grad for arg in args
    )


class _Latest:
    """The latest call, if its arguments were plain: a quick test whether the next is served by its program.

    The test is stricter than signature and shape guard, it wants the same sizes and strides; but it is made
    in C++.  Nearly all calls of a training or serving loop pass it.
    """

    def __init__(
        self, args: tuple[torch.Tensor, ...], region: Region, watch: ModuleWatch | None, program: Program
    ) -> None:
        self.program = program
        self._count = len(args)
        self._alike = tensor_check(args)
        self._region, self._watch = region, watch
        self._modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        self._training = watch.training() if watch is not None else ()

    def is_like(self, args: tuple[Any, ...], region: Region) -> bool:
        """Whether a call with *args* in *region* is served by the same program."""
        if len(set(map(id, args))) != self._count or len(args) != self._count or region != self._region:
            return False
        try:
            if not self._alike(*args):
                return False
        except TypeError:  # not a tensor
            return False
        if (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) != self._modes:
            return False
        watch = self._watch
        return watch is None or (watch.intact() and watch.training() == self._training and not watch.hooked())


def _describe(tensor: torch.Tensor) -> Any:
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
