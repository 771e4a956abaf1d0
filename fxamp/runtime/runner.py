"""The runner of one module: picks the program that serves a call, captures a new one, or runs eagerly.

A call's signature is the structure of its arguments, what autocast asks of each tensor, the training flags,
the gradient and inference mode and the state of autocast.  A program of the same signature serves the call
if its shape guard holds and the module's own tensors are as they were.  A call that cannot be captured is
run by the module's Python inside a real region, with every child module on a runner of its own.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from fxamp.capture.segments import Captured, NeedsValuesError
from fxamp.capture.structure import Spec, flatten
from fxamp.capture.symbols import Sizes
from fxamp.errors import (
    ArgumentError,
    CaptureError,
    FrozenError,
    InvariantError,
    PolicyError,
    RecaptureWarning,
)
from fxamp.ir.regions import RealRegion, Region, observe_region
from fxamp.policy.scopes import PlacedPolicy, place
from fxamp.runtime.build_program import build_program
from fxamp.runtime.cast_scope import CastScope, keep_cast
from fxamp.runtime.eager_region import region_of_eager_code, region_of_methods
from fxamp.runtime.eager_use import EagerUse, Onlooker, UsedOutsideError
from fxamp.runtime.failures import Failure, Failures
from fxamp.runtime.findings import Findings
from fxamp.runtime.options import Options
from fxamp.runtime.override_check import check_overrides
from fxamp.runtime.planning import compare_with_plan
from fxamp.runtime.program import Program
from fxamp.runtime.recapture import Cause, Recaptures, family_of, find_cause
from fxamp.runtime.recording import Recording
from fxamp.runtime.route import Left, Route, Routes
from fxamp.runtime.shadow import shadow_of
from fxamp.runtime.signature import Latest, are_plain, signature
from fxamp.runtime.walk import Walk
from fxamp.runtime.watch import ModuleWatch

__all__ = ["Runner"]

_MOST_BRANCHES = 32  # ways on from one segment
_LEAF_SPEC: Spec = ("leaf",)
_ONE_TENSOR: Spec = (tuple, ((tuple, (_LEAF_SPEC,)), (dict, ())))


@dataclass(frozen=True, slots=True)
class _Call:
    """One call.

    Attributes:
        key: Its signature.
        leaves: The tensors of its arguments.
        given: ``(args, kwargs)``.
        region: What it runs in.
    """

    key: Any
    leaves: list[torch.Tensor]
    given: tuple[tuple[Any, ...], dict[str, Any]]
    region: Region

    @property
    def spec(self) -> Spec:
        """The structure of the arguments."""
        spec: Spec = self.key[0]
        return spec


class Runner:
    """Runs one module, or one function, as eager autocast would.

    Args:
        function: The user's module or function; never changed.
        path: Its dotted path in the converted model, ``""`` for the model itself.
        options: How it is converted.

    Attributes:
        children: The runners of the child modules, once the module has run eagerly.
        programs: What was captured, by signature.
        failures: Why calls of a signature run eagerly.
        last: The program that served the last call.
        recaptures: Why modules of the converted model were captured again.
        placed: The policy on the model, if it is not torch's own.
        findings: What capture has shown of it.
    """

    _surveys = True  # the first eager run of a kind shows which weights eager code uses

    def __init__(
        self, function: Callable[..., Any], path: str, options: Options, parent: Runner | None = None
    ) -> None:
        self.function, self.path, self.options = function, path, options
        self._use: EagerUse = parent._use if parent is not None else EagerUse()
        self.findings: Findings = parent.findings if parent is not None else Findings()
        self.recaptures: Recaptures = parent.recaptures if parent is not None else Recaptures()
        self.placed: PlacedPolicy | None = parent.placed if parent is not None else _placed(options, function)
        self.children: dict[int, Runner] = {}
        self.programs: dict[Any, list[Program]] = {}
        self.failures = Failures()
        self.last: Program | None = None
        self._latest: Latest | None = None
        self._routes: dict[Program, Routes] = {}
        self._surveyed: set[Any] = set()
        self._changed: Cause | None = None
        self._lock = threading.RLock()
        self._watch = self._new_watch()

    def _new_watch(self) -> ModuleWatch | None:
        return ModuleWatch(self.function) if isinstance(self.function, nn.Module) else None

    def _below(self, child: nn.Module, path: str) -> Runner:
        """The runner of a child module."""
        return Runner(child, path, self.options, self)

    # --- calls --------------------------------------------------------------------------------------

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        """The result of ``function(*args, **kwargs)`` in *region*."""
        latest = self._latest
        if (
            latest is not None
            and not kwargs
            and latest.is_like(args, region)
            and self._may_run(latest.program)
        ):
            tensors, held = latest.check()
            program = latest.program
            if tensors is not None and program.operator is None:
                return program.run(list(args), tensors, (args, kwargs))
            if tensors is not None:
                call = _Call(latest.key, list(args), (args, kwargs), region)
                return self._run_from(program, tensors, call, held)
        return self._call(args, kwargs, region)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        self._latest = None
        try:
            call = self._sign(args, kwargs, region)
        except CaptureError as error:
            self.failures[None] = Failure(str(error))
            return self._run_eagerly(None, args, kwargs, region)
        program, tensors = self._find(call)
        if program is None:
            return self._first_call(call)
        if not self._may_run(program):
            return self._run_beside(program, call)
        self.last = program
        if not kwargs and are_plain(args):
            self._latest = Latest(args, region, self._watch, program, call.key, self._routes_of(program))
        if program.operator is None:
            return program.run(call.leaves, tensors, call.given)
        return self._run_from(program, tensors, call, None)

    def _run_from(self, program: Program, tensors: Any, call: _Call, held: Route | None) -> Any:
        """The result of a call that begins with *program*: on its route as far as that goes."""
        routes = self._routes_of(program)
        assert routes is not None
        route = routes.current
        with CastScope():
            left = None
            if route is not None:
                left = route.run(call.leaves, tensors, call.given, held=held is route)
                if not isinstance(left, Left):
                    routes.misses = 0
                    return left
            walk = self._walk(call)
            go = (lambda: walk.run(program, tensors)) if left is None else (lambda: walk.go_on(left))
            result = self._run_segments(walk, go, call)
        if not walk.explored:
            routes.follow(walk.path, len(call.leaves))
        return result

    def _routes_of(self, program: Program) -> Routes | None:
        """The routes of calls that begin with *program*; none where that is all of a call."""
        if program.operator is None:
            return None
        return self._routes.get(program) or self._routes.setdefault(program, Routes())

    def _first_call(self, call: _Call) -> Any:
        """Capture the call, and run it: its last segment if the others had to be run to capture it."""
        key = call.key
        looking_on = bool(self.path) and self._use.surveying
        walk = None if looking_on else self._walk(call)
        known = self.failures.has(key)
        with CastScope(), self._overrides_checked(key):
            program = self._capture(call, walk)
            if program is not None and not (walk is not None and walk.begun):
                self._check_overrides()  # before anything runs
            if program is None and looking_on and not self.failures.has(key):
                return self._look_on(*call.given, call.region)
            if program is None:
                try:
                    return self._run_eagerly(self.failures.scope_of(key), *call.given, call.region)
                except Exception:
                    if not known:  # it may be the call that is at fault, not the model
                        self.failures.pop(key, None)
                    raise
            if walk is not None and walk.begun:
                return self._run_segments(walk, lambda: walk.finish(program), call)
        return self._call(*call.given, call.region)

    def _run_segments(self, walk: Walk, go: Callable[[], Any], call: _Call) -> Any:
        """Run a call that reads values; if it takes a way that cannot be captured, begin again eagerly."""
        try:
            result = go()
        except CaptureError as error:
            walk.undo()
            result = self._run_eagerly(call.key, *call.given, call.region)
            self._give_up(call.key, Failure(str(error), shared=isinstance(error, UsedOutsideError)))
            return result
        if walk.explored and any(len(program.branches) > _MOST_BRANCHES for program in walk.path):
            reason = f"what the model reads from tensors took it more than {_MOST_BRANCHES} ways"
            self._give_up(call.key, Failure(reason))
        return result

    def _give_up(self, key: Any, failure: Failure) -> None:
        for program in self.programs.pop(key, ()):
            self._routes.pop(program, None)
        self.failures[key] = failure
        self._latest = None

    def _walk(self, call: _Call) -> Walk:
        def record(walk: Walk, sizes: Sizes) -> Captured:
            return self._record(self._recording(call), sizes, walk)

        return Walk(call.leaves, call.given, self._build, record)

    def _recording(self, call: _Call) -> Recording:
        shapes = None if self.path else self.options.dynamic_shapes  # said of the model's arguments
        return Recording(self.function, call.spec, call.leaves, call.region, shapes, self.options.whole_loops)

    def _record(self, recording: Recording, sizes: Sizes, walk: Walk | None) -> Captured:
        with self._lock:
            return recording.make(sizes, walk, self.placed, self.findings)

    def _build(self, captured: Captured, sizes: Sizes, *, alone: bool) -> Program:
        keep = keep_cast if self.path or not alone else None
        program = self._program(captured, sizes, keep, alone=alone)
        if not alone and not self._use.is_inside(program.kept, self.path):
            raise UsedOutsideError
        return program

    def _program(
        self, captured: Captured, sizes: Sizes, keep: Callable[..., torch.Tensor] | None, *, alone: bool
    ) -> Program:
        return build_program(captured, self.function, self.options.policy, sizes, keep, alone=alone)

    def _may_run(self, program: Program) -> bool:
        return not self.path or (not self._use.surveying and self._use.is_inside(program.kept, self.path))

    def _run_beside(self, program: Program, call: _Call) -> Any:
        """Run by the module's own Python although there is a program: in a survey, or for good."""
        if self._use.is_inside(program.kept, self.path):
            return self._look_on(*call.given, call.region)
        self.failures[call.key] = Failure.of(UsedOutsideError())
        return self._run_eagerly(call.key, *call.given, call.region)

    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> None:
        """Capture the program for a call, if there is none yet, and do not run it."""
        self._latest = None
        try:
            call = self._sign(args, kwargs, region)
        except CaptureError as error:
            self.failures[None] = Failure(str(error))
            return
        program, _ = self._find(call)
        with self._overrides_checked(call.key):
            self.last = program or self._capture(call, None)
        if self.last is None and any(leaf.is_meta for leaf in call.leaves):
            known = self.failures.get(call.key)
            reason = known.reason if known is not None else "the call reads values of tensors"
            raise CaptureError(f"{reason}, and a tensor on the meta device has no values")

    def _sign(self, args: Any, kwargs: Any, region: Region) -> _Call:
        if self._watch is not None and not self._watch.intact():
            self.forget()
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor):
            spec, leaves = _ONE_TENSOR, [args[0]]
        else:
            spec, leaves = flatten((args, kwargs))
        return _Call(signature(spec, leaves, region, self._watch), leaves, (args, kwargs), region)

    def _find(self, call: _Call) -> tuple[Program | None, Any]:
        for program in self.programs.get(call.key, ()):
            if program.guard.holds(call.leaves):
                tensors = program.tensors()
                if tensors is not None:
                    return program, tensors
        return None, None

    def _capture(self, call: _Call, walk: Walk | None) -> Program | None:
        """The program for a call: the one that there is now, or a new one, or none.

        With *walk* the call may have begun; then the program is the last of the call's.
        """
        key, leaves = call.key, call.leaves
        with self._lock:
            program, _ = self._find(call)  # another thread may have been faster
            if program is not None:
                return program
            self.failures.forgive(key)
            refused = self.failures.has(key) or self._is_uninitialized()
            if refused or not self._may_capture(key, leaves):
                return None
            try:
                self._refuse_hooks()
                sizes = self._sizes(key, leaves)
                if walk is None:
                    captured = self._record(self._recording(call), sizes, None)
                    program = self._build(captured, sizes, alone=True)
                else:
                    program = walk.explore(sizes)
            except CaptureError as error:
                if walk is None and isinstance(error, NeedsValuesError):
                    self.recaptures.withdraw(self.path, family_of(key))
                    return None  # they come with the first real call
                self.failures[key] = Failure.of(error)
            except (PolicyError, InvariantError, ArgumentError, FrozenError):
                self.recaptures.withdraw(self.path, family_of(key))
                raise
            except Exception as error:  # noqa: BLE001  eager autocast would have run the model, so it is run
                self.failures[key] = Failure(f"a fault of fxamp: {type(error).__name__}: {error}")
                warnings.warn(
                    f"{self.path or 'the model'} runs eagerly: {self.failures[key].reason}", stacklevel=4
                )
            if program is None:
                if walk is not None:
                    walk.undo()
                return None
            self._keep(key, walk.path[0] if walk is not None and walk.path else program)
            self.findings.plan_differences += compare_with_plan(self.options.policy, program, self.path)
            return program

    def _keep(self, key: Any, program: Program) -> None:
        """Put *program* first among those of its signature."""
        self.programs[key] = [program, *self.programs.pop(key, [])]

    def _may_capture(self, key: Any, leaves: list[torch.Tensor]) -> bool:
        """Count the capture; where it is one too many, such calls run eagerly from now on."""
        cause = self._changed or find_cause(self.function, key, leaves, self.programs, tuple(self.failures))
        self._changed = None
        limit = self.options.recapture_limit
        refused = self.recaptures.admit(self.path, family_of(key), cause, limit)
        if refused is None:
            return True
        scope, reason = refused
        self.failures[scope] = Failure(reason, whole=any(f.whole for f in self.failures.values()))
        warnings.warn(reason, RecaptureWarning, stacklevel=5)
        return False

    @contextmanager
    def _overrides_checked(self, key: Any) -> Iterator[None]:
        """Refuse the model, once a call of it is known, where an override means nothing in it."""
        try:
            yield
            self._check_overrides()
        except PolicyError:
            self.programs.pop(key, None)
            raise

    def _check_overrides(self) -> None:
        if self.placed is not None and not self.path:
            modules = [
                module for runner in self.tree() for p in runner.all_programs() for module in p.modules()
            ]
            check_overrides(self.options.policy.overrides, self.findings.meant, modules)

    def allow(self, limit: int) -> None:
        """Set the recapture limit of this runner and those below."""
        for runner in self.tree():
            runner.options = replace(runner.options, recapture_limit=limit)
            runner.failures.lift_limits()

    def _sizes(self, key: Any, leaves: list[torch.Tensor]) -> Sizes:
        other_sizes = any(not program.guard.holds(leaves) for program in self.programs.get(key, ()))
        fixed = self.options.sizes is Sizes.FIXED
        return Sizes.ALL if other_sizes and not fixed else self.options.sizes

    def _refuse_hooks(self) -> None:
        where = self._watch.where_hooked() if self._watch is not None and self._watch.hooks() else ""
        if where:
            raise CaptureError(f"hooks are registered on {where}")

    def _is_uninitialized(self) -> bool:
        """Whether a lazy module has not seen its first call, which creates its parameters."""
        if not isinstance(self.function, nn.Module):
            return False
        tensors = [*self.function.parameters(), *self.function.buffers()]
        return any(is_lazy(tensor) for tensor in tensors)

    # --- eager pieces -------------------------------------------------------------------------------

    def _run_eagerly(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        """Run the module's own Python; the first time for each signature, as a survey."""
        function, failure = self.function, self.failures.get(key)
        survey = self._surveys and key not in self._surveyed
        self._surveyed.add(key)
        self.failures.called.add(key)
        if isinstance(function, nn.Module) and failure is not None and not failure.whole:
            function = shadow_of(function, self)
        with ExitStack() as stack:
            if survey:
                stack.enter_context(self._use.survey())
            if not self.path:  # below the model the region is there already
                stack.enter_context(CastScope())
            stack.enter_context(self._region_of_eager_code(region))
            return function(*args, **kwargs)

    def region_of_methods(self, region: Region) -> RealRegion:
        """What methods of the model other than ``forward`` run in."""
        return region_of_methods(region, self.placed)

    def _region_of_eager_code(self, region: Region) -> AbstractContextManager[object]:
        return region_of_eager_code(region, self.placed, self.function, self.path, self.findings)

    def _look_on(self, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        """Run a module below an eager piece by its own Python, children included."""
        assert isinstance(self.function, nn.Module)
        with self._region_of_eager_code(region):
            return Onlooker(self._use, "").call_child(self.function, self.path, args, kwargs)

    def call_child(self, child: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a child of an eager piece, on its own runner (the side of ``Host``)."""
        runner = self.children.get(id(child))
        if runner is None or runner.function is not child:
            full = f"{self.path}.{path}" if self.path else path
            runner = self.children.setdefault(id(child), self._below(child, full))
        region = observe_region(self.options.policy.device_type)
        if self.placed is None:
            return runner(args, kwargs, region)
        with _disable_current_modes():  # the child sees to the policy itself
            return runner(args, kwargs, region)

    def read_parameter(self, parameter: nn.Parameter) -> None:
        """Note that eager code uses *parameter* (the side of ``Host``)."""
        self._use.note(parameter, self.path)

    # --- what was decided ---------------------------------------------------------------------------

    def forget(self) -> None:
        """Drop what was captured: the module is not the one it was captured from."""
        with self._lock:
            if self._watch is not None:
                text = self._watch.difference() or "the modules changed"
                self._changed = Cause(text, "convert the model again once it has its final form")
            self.placed = self.placed and _placed(self.options, self.function)
            self.programs, self.children, self._routes = {}, {}, {}
            self.failures.clear()
            self.last, self._latest, self._surveyed = None, None, set()
            self._watch = self._new_watch()

    def all_programs(self) -> list[Program]:
        """The programs of this runner, with those that go on from them."""
        return [p for served in list(self.programs.values()) for first in served for p in first.tree()]

    @property
    def needs_first_call(self) -> bool:
        """Whether a call could be captured only after one had set attributes of the model."""
        return any(runner.failures.forgiven - runner.failures.keys() for runner in self.tree())

    def used_by(self, paths: set[str]) -> set[int]:
        """The parameters, by ``id``, that the eager code of the modules at *paths* uses."""
        return self._use.used_by(paths)

    def tree(self) -> list[Runner]:
        """This runner and those of all eager pieces below it."""
        return [self, *(below for child in list(self.children.values()) for below in child.tree())]


def _placed(options: Options, function: object) -> PlacedPolicy | None:
    """The policy on the model, where torch's own autocast does not do."""
    return None if options.policy.is_torchs_own else place(options.policy, function)
