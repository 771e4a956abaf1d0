"""The converted model: an ``nn.Module`` around the user's, with the same parameters under the same names."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from fxamp.errors import ArgumentError
from fxamp.ir.regions import Region
from fxamp.policy import Policy
from fxamp.policy.plan import Plan
from fxamp.runtime.cost_report import CostReport, cost_report
from fxamp.runtime.grad_scaler import GradScaler
from fxamp.runtime.methods import bound_to, signed_like
from fxamp.runtime.options import Options
from fxamp.runtime.planning import plan_of
from fxamp.runtime.program import with_code
from fxamp.runtime.report import Report, report_on
from fxamp.runtime.runner import Runner
from fxamp.runtime.stand_in import standing_in

__all__ = ["AmpModule", "again", "policy_of", "source_of"]

_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class _Forward:
    """``forward``: on an instance, with the signature of the source's, which trainers read."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __get__(self, module: AmpModule | None, cls: type) -> Any:
        return self.function if module is None else MethodType(module.__dict__["_forward"], module)


class AmpModule(nn.Module):
    """A model that runs as eager autocast would run it, with the casts written in its graphs.

    Made by :func:`fxamp.convert`.  Parameters, buffers and child modules are the source model's own objects,
    so an optimiser over either updates both; ``state_dict``, ``train``, ``to`` act on the source.  Attributes
    that an ``nn.Module`` does not have are looked up on the source; its methods run as under eager autocast
    (``fxamp/runtime/methods.py``).  For ``isinstance`` it is of the source's class, too, and its ``forward``
    has the source's signature: trainers look at both.

    Each thread may call it at any time; an ambient autocast region has no influence on it.
    """

    def __init__(self, source: nn.Module | Callable[..., Any], options: Options) -> None:
        self.__dict__["_function"] = source
        self.__dict__["_source"] = source if isinstance(source, nn.Module) else nn.Module()
        super().__init__()
        for name in _SHARED:
            self.__dict__[name] = self._source.__dict__[name]
        self.__dict__["_forward"] = signed_like(AmpModule.forward, source)
        self._adopt(options)

    def _adopt(self, options: Options) -> None:
        """Convert by *options*, which act on the tensors of the device that the source is on."""
        policy = standing_in(options.policy, self._function)
        self.__dict__["_asked"] = options
        self.__dict__["_options"] = replace(options, policy=policy)
        self.__dict__["_runner"] = Runner(self._function, "", self._options)
        self.__dict__["_region"] = Region(policy.device_type, enabled=True, dtype=policy.low)

    @_Forward
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What ``source(*args, **kwargs)`` gives under ``torch.autocast``, bit for bit."""
        return self._runner(args, kwargs, self._region)

    def capture(self, *args: Any, **kwargs: Any) -> None:
        """Capture the program for a call without running it.

        Raises:
            PolicyError: Eager autocast refuses an operator of the call.
        """
        self._runner.capture(args, kwargs, self._region)

    # --- what was decided ---------------------------------------------------------------------------

    @cached_property
    def scaler(self) -> GradScaler:
        """The loss scaler for this model: enabled for float16, a no-op for bfloat16."""
        policy = self._options.policy
        return GradScaler(policy.device_type, enabled=policy.low is torch.float16)

    @property
    def graph_module(self) -> GraphModule:
        """The rewritten graph that served the last call.

        Raises:
            LookupError: Nothing has been captured yet, or the model runs eagerly.
        """
        program = self._runner.last
        if program is None:
            raise LookupError(
                "no graph has been captured\n"
                "  call the model; if it runs eagerly, amp.report().eager says why"
            )
        return with_code(program.module)

    @property
    def graph_modules(self) -> tuple[GraphModule, ...]:
        """All rewritten graphs, of the model and of the children of eager pieces."""
        return tuple(
            with_code(module)
            for runner in self._runner.tree()
            for program in runner.all_programs()
            for module in program.modules()
        )

    @property
    def eager_modules(self) -> tuple[str, ...]:
        """Dotted paths of the modules whose Python runs eagerly, ``""`` for the model itself."""
        return tuple(sorted(runner.path for runner in self._runner.tree() if runner.failures))

    def report(self) -> Report:
        """What was decided for every operator, and which pieces run eagerly and why."""
        return report_on(self._runner)

    def plan(self) -> Plan:
        """What was decided, to be written to a file: ``amp.plan().write("plan.json")``.

        It has the policy with its overrides, and for every graph so far each operator with its dtypes and
        rule.  ``convert(model, policy=fxamp.Policy.from_plan("plan.json"))`` makes the same graphs again, or
        says what differs.
        """
        programs = [program for runner in self._runner.tree() for program in runner.all_programs()]
        return plan_of(self._asked.policy, programs)

    def cost(self) -> CostReport:
        """What the call that was made last costs: casts, kernels and bytes, in symbolic sizes.

        Raises:
            LookupError: Nothing has been captured yet.
        """
        return cost_report(self._runner)

    @property
    def recapture_limit(self) -> int:
        """How often calls that differ only in values are captured; after that they run eagerly.

        Values are numbers and strings among the arguments, sizes that are not symbolic, and attributes and
        tensors of the model.  A module is captured eight times as often for all kinds of calls together.
        """
        return int(self._options.recapture_limit)

    @recapture_limit.setter
    def recapture_limit(self, limit: int) -> None:
        if limit < 1:
            raise ArgumentError(f"recapture_limit is at least 1, not {limit}")
        self.__dict__["_options"] = replace(self._options, recapture_limit=limit)
        self.__dict__["_asked"] = replace(self._asked, recapture_limit=limit)
        self._runner.allow(limit)

    # --- the model that this stands for -------------------------------------------------------------

    @property
    def training(self) -> bool:
        """The training flag of the source."""
        return bool(self._source.training)

    @training.setter
    def training(self, mode: bool) -> None:
        if "_region" in self.__dict__:  # nn.Module.__init__ sets it too; the source keeps its own flag then
            self._source.training = mode

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The source's class, for ``isinstance``; ``type`` gives this one."""
        return AmpModule if self._source is not self._function else type(self._source)

    def train(self, mode: bool = True) -> AmpModule:  # noqa: FBT001, FBT002
        """Put the source in training mode, by its own ``train``."""
        self._source.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The source's ``state_dict``."""
        return self._source.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The source's ``load_state_dict``."""
        return self._source.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any) -> None:
        self._source._load_from_state_dict(*args)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """The source's modules; the root is this module."""
        for name, module in self._source.named_modules(*args, **kwargs):
            yield name, self if module is self._source else module

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> AmpModule:  # noqa: FBT001, FBT002
        self._source._apply(fn, recurse)
        if standing_in(self._asked.policy, self._function) != self._options.policy:
            self._adopt(self._asked)  # on another device the policy acts on other tensors
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_source" not in self.__dict__:
                raise
            region = self._runner.region_of_methods(self._region)
            return bound_to(self, self._source, region, getattr(self._source, name))

    def __setattr__(self, name: str, value: Any) -> None:
        """Set on the source what is not this class's own."""
        if hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self._source, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> AmpModule:
        copied = AmpModule(copy.deepcopy(self._function, memo), self._asked)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return AmpModule, (self._function, self._asked)

    def _get_name(self) -> str:
        return "AmpModule"

    def extra_repr(self) -> str:
        """Which policy the model was converted under."""
        return f"policy={self._options.policy}"


def source_of(amp: AmpModule) -> nn.Module | Callable[..., Any]:
    """What *amp* was converted from."""
    source: nn.Module | Callable[..., Any] = amp._function
    return source


def policy_of(amp: AmpModule) -> Policy:
    """The policy that *amp* was converted under."""
    policy: Policy = amp._options.policy
    return policy


def again(amp: AmpModule) -> AmpModule:
    """The same source converted in the same way, with nothing captured yet, and loops over time in steps."""
    return AmpModule(amp._function, replace(amp._asked, whole_loops=False))
