"""Call operators as autocast would, if it followed a policy that is not torch's own.

Torch's dispatcher casts by its own lists.  For a policy with overrides, or one with another device type's
table, its autocast is switched off below this, and the wrapper of ``ATen/autocast_mode.h`` is carried out
here: on fake tensors while a call is recorded, so that the model's Python sees the dtypes of the policy, and
on real ones around Python that runs eagerly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch._dispatch.python import enable_python_dispatcher, no_python_dispatcher
from torch._guards import active_fake_mode
from torch._ops import OpOverload, key_extractor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree

from fxamp.capture.composite_bodies import call_body, is_upsample
from fxamp.capture.dtype_reads import DtypeRead
from fxamp.capture.locks import pre_dispatch_lock
from fxamp.capture.recording_mode import RecordingMode
from fxamp.capture.table_regions import table_regions
from fxamp.errors import PolicyError
from fxamp.ir.facts import Fact, fact_of, is_cacheable_leaf
from fxamp.ir.operators import is_composite
from fxamp.ir.regions import Region, no_autocast, observe_region
from fxamp.ir.where import Where, codes_now, where_now
from fxamp.policy import CastPolicy, OpRule, Policy
from fxamp.policy.custom_rules import custom_rule
from fxamp.policy.override import NO_OVERRIDE, Ruling, Verb
from fxamp.policy.passive import ONLY_INPUT
from fxamp.policy.reentrant import REENTRANT
from fxamp.policy.scopes import PlacedPolicy
from fxamp.policy.site import Site
from fxamp.policy.table import REDISPATCHES

__all__ = [
    "Here",
    "PolicyDispatch",
    "PolicyRegion",
    "consults_autocast",
    "inputs_of",
    "low_dtype",
    "rule_for",
    "site_of",
]

_TENSORS = ("Tensor", "Optional[Tensor]", "List[Tensor]")
_DECIDING = ("Tensor", "List[Tensor]")
_LEFT_OUT = object()
_BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.PreDispatch)

Keep = Callable[[torch.Tensor, torch.dtype], torch.Tensor]
Here = Callable[[OpOverload, Any], Site]


@dataclass
class PolicyDispatch:
    """Calls operators under a policy.

    Attributes:
        placed: The policy, on a model.
        here: Makes the site of a call, for the selectors of overrides.
        keep: Gives the one cast of a leaf that a region keeps; without it every cast is a new one.
        meant: Which overrides have decided or lost, by their places.
        dtypes_read: The dtypes that the model's Python asked for.
    """

    placed: PlacedPolicy
    here: Here
    keep: Keep | None = None
    meant: frozenset[int] = frozenset()
    dtypes_read: list[DtypeRead] = field(default_factory=list)

    @property
    def policy(self) -> Policy:
        """What operators are called under."""
        return self.placed.policy

    def call(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """The result of *func* under the policy, in the region that this thread is in."""
        return self.call_in(observe_region(self.policy.device_type), func, args, kwargs)

    def ruling_on(self, func: OpOverload, args: Any, kwargs: Any) -> Ruling:
        """What the overrides say of a call."""
        if not self.policy.overrides:
            return NO_OVERRIDE
        return self.ruling_at(self.here(func, (args, kwargs)))

    def ruling_at(self, site: Site) -> Ruling:
        """What the overrides say of the call at *site*."""
        ruling, meant = self.policy.ruling(site)
        self.meant |= meant
        return ruling

    def call_in(
        self, region: Region, func: OpOverload, args: Any, kwargs: Any, ruling: Ruling | None = None
    ) -> Any:
        """The result of *func* under the policy, in *region*; *ruling* if it is known."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            self._refuse_gradients(func)
            return self._with_kernel_watched(region, func, args, kwargs)  # cast once it is transformed
        if ruling is None:
            ruling = self.ruling_on(func, args, kwargs)
        rule = rule_for(func, ruling, region, self.policy)
        if rule is not None:
            return self._wrapped(func, args, kwargs, rule, ruling, region)
        decides = ruling.won is None and (region.enabled or self.policy.overrides)
        if decides and is_composite(func):
            with RecordingMode(partial(self.call_in, region)):
                return _body(func, args, kwargs)
        if decides and consults_autocast(func) and not _are_fake(args, kwargs):  # fakes have no kernels
            return self._with_kernel_watched(region, func, args, kwargs)
        with _below(args, kwargs):
            return func(*args, **kwargs)

    def _refuse_gradients(self, func: OpOverload) -> None:
        stack = torch._C._functorch.get_interpreter_stack() or []
        if any(level.key() != torch._C._functorch.TransformType.Vmap for level in stack):
            raise PolicyError(
                f"{func.name()} is called inside a gradient transform of torch.func, "
                f"where {self.policy} cannot act\n"
                "  take the transform out of the converted model, or use torch's own policy"
            )

    def _with_kernel_watched(self, region: Region, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Run the kernel with its own calls dispatched here too."""
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        with no_autocast(), RecordingMode(partial(self.call_in, region)):
            return func.redispatch(_keys_of(func, tensors), *args, **kwargs)

    # --- the wrapper --------------------------------------------------------------------------------

    def _wrapped(
        self, func: OpOverload, args: Any, kwargs: Any, rule: OpRule, ruling: Ruling, region: Region
    ) -> Any:
        low = low_dtype(region, self.policy)
        arguments = func._schema.arguments
        values = [*args, *(kwargs.get(argument.name, _LEFT_OUT) for argument in arguments[len(args) :])]
        with _below(args, kwargs):
            if rule.cast is CastPolicy.BANNED:
                raise PolicyError(f"{func.name()} is unsafe to autocast: {rule.why}")
            if rule.cast is CastPolicy.FP32_SET_OPT_DTYPE:
                self._set_dtype(arguments, values)
            elif rule.cast is CastPolicy.FP32_APPEND_DTYPE:
                return self._append_dtype(func, values)
            else:
                self._cast_all(func, values, self._target(rule, arguments, values, low), region)
            given = zip(arguments, values, strict=True)
            result = func(**{argument.name: value for argument, value in given if value is not _LEFT_OUT})
            if ruling.won is not None and ruling.won.verb is Verb.FLOAT32_TO_LOW:
                result = map_aggregate(result, lambda value: self._lowered(value, low))
            return result

    def _set_dtype(self, arguments: list[Any], values: list[Any]) -> None:
        place = [argument.name for argument in arguments].index("dtype")
        if self._castable(values[0]) and (values[place] is _LEFT_OUT or values[place] is None):
            values[place] = torch.float32

    def _append_dtype(self, func: OpOverload, values: list[Any]) -> Any:
        overload = REDISPATCHES[func.name()].split(".")[-1]
        defaults = [
            argument.default_value if value is _LEFT_OUT else value
            for argument, value in zip(func._schema.arguments, values, strict=True)
        ]
        dtype = torch.float32 if self._castable(values[0]) else values[0].dtype
        return getattr(func.overloadpacket, overload)(*defaults, dtype=dtype)

    def _target(self, rule: OpRule, arguments: list[Any], values: list[Any], low: torch.dtype) -> torch.dtype:
        if rule.cast is not CastPolicy.PROMOTE:
            return low if rule.cast is CastPolicy.LOWER_PRECISION_FP else torch.float32
        joined = low
        for argument, value in zip(arguments, values, strict=True):
            if str(argument.type) not in _DECIDING or value is _LEFT_OUT:
                continue
            for item in value if isinstance(value, (list, tuple)) else [value]:
                if not self._castable(item):
                    continue
                if torch.float32 in (joined, item.dtype):
                    joined = torch.float32
                elif item.dtype is not low:
                    raise PolicyError(
                        f"Unexpected floating ScalarType in at::autocast::prioritize: {item.dtype} where the "
                        f"region's dtype is {low}\n  cast it yourself:  x.float() or x.to({low})"
                    )
        return joined

    def _cast_all(self, func: OpOverload, values: list[Any], target: torch.dtype, region: Region) -> None:
        """Cast *values* from right to left, as the C++ wrapper does; the items of a list from the left."""
        for index in reversed(range(len(values))):
            kind = str(func._schema.arguments[index].type)
            if kind not in _TENSORS or (index and func.name() in ONLY_INPUT):
                continue
            cast = partial(self._cast, target=target, region=region, may_keep=func.namespace == "aten")
            values[index] = map_aggregate(values[index], cast)

    def _cast(self, value: Any, *, target: torch.dtype, region: Region, may_keep: bool) -> Any:
        if not self._castable(value) or value.dtype is target:
            return value
        kept = (
            may_keep
            and self.keep is not None
            and target is low_dtype(region, self.policy)
            and value.dtype is torch.float32
            and region.cache
            and is_cacheable_leaf(value)
        )
        return self.keep(value, target) if kept and self.keep is not None else value.to(target)

    def _lowered(self, value: Any, low: torch.dtype) -> Any:
        is_wide = self._castable(value) and value.dtype is torch.float32
        return value.to(low) if is_wide else value

    def _castable(self, value: Any) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and value.device.type == self.policy.device_type
            and value.is_floating_point()
            and value.dtype is not torch.float64
        )


def _keys_of(func: OpOverload, tensors: list[torch.Tensor]) -> torch._C.DispatchKeySet:
    """The dispatch keys of a call, from the first one below this mode that has a kernel."""
    keys: torch._C.DispatchKeySet = key_extractor(tensors, _BELOW).remove(
        torch._C.DispatchKey.PythonDispatcher
    )
    for key in _fallthrough_keys(func.name()):
        keys = keys.remove(key)
    return keys


@cache
def _fallthrough_keys(name: str) -> tuple[torch._C.DispatchKey, ...]:
    """The keys whose entry in the operator's dispatch table is to go on to the next one."""
    lines = torch._C._dispatch_dump_table(name).splitlines()
    passed = [line.partition(":")[0] for line in lines if "fallthrough registered" in line]
    known = [getattr(torch._C.DispatchKey, key, None) for key in passed]
    return tuple(key for key in known if key is not None)


def _body(func: OpOverload, args: Any, kwargs: Any) -> Any:
    """Run the implementation of the composite *func*, on real tensors that in C++."""
    if not _are_fake(args, kwargs) and not is_upsample(func):
        return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
    return call_body(func, args, kwargs) if is_upsample(func) else func.decompose(*args, **kwargs)


@contextmanager
def _below(args: Any, kwargs: Any) -> Iterator[None]:
    """Operators called inside are neither cast nor, on real tensors, replaced by decompositions in Python."""
    with no_autocast(), nullcontext() if _are_fake(args, kwargs) else no_python_dispatcher():
        yield


def _are_fake(args: Any, kwargs: Any) -> bool:
    leaves = pytree.tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return any(isinstance(tensor, FakeTensor) for tensor in tensors) or (
        not tensors and active_fake_mode() is not None
    )


def rule_for(func: OpOverload, ruling: Ruling, region: Region, policy: Policy) -> OpRule | None:
    """The rule for a call: the override's that means it, else the table's if *region* is enabled."""
    if ruling.won is not None:
        return ruling.won.rule_for(func.name())
    if not region.enabled:
        return None
    if func.namespace == "aten":
        return policy.rule(func)
    if (rule := policy.rule(func)) is not None or policy.is_torchs_own:
        return rule  # torch's own autocast sees to the rules of custom operators
    return custom_rule(func, policy.table, region.dtype)


def low_dtype(region: Region, policy: Policy) -> torch.dtype:
    """The low precision dtype in *region*; a region that is switched off names none of its own."""
    return region.dtype if region.enabled else policy.low


def consults_autocast(func: OpOverload) -> bool:
    """Whether the kernel of *func* calls operators that autocast intercepts, or nobody knows."""
    return func.namespace != "aten" or func.name() in REENTRANT


@dataclass(frozen=True, repr=False)
class PolicyRegion:
    """A region in which real code runs under a policy that is not torch's own.

    Attributes:
        region: The state of autocast that Python sees.
        placed: The policy.
        modules: The paths of the modules that are being called.
        scopes: The overrides that select one of them.
        keep: See :class:`PolicyDispatch`.
    """

    region: Region
    placed: PlacedPolicy
    modules: tuple[str, ...] = ("",)
    scopes: frozenset[int] = frozenset()
    keep: Keep | None = None
    is_region: ClassVar[bool] = True

    @property
    def enabled(self) -> bool:
        """Whether operators are cast by the table."""
        return self.region.enabled

    @contextmanager
    def context(self) -> Iterator[PolicyDispatch]:
        """Operators that this thread calls inside are called under the policy; other threads wait."""
        dispatch = PolicyDispatch(self.placed, self._here, self.keep or _Kept().cast)
        with pre_dispatch_lock, ExitStack() as stack:
            stack.enter_context(table_regions(self.placed.policy))
            stack.enter_context(_compiled_code_opened())
            if self.region.enabled:
                stack.enter_context(self.region.context())
            else:
                stack.enter_context(no_autocast())
            stack.enter_context(enable_python_dispatcher())
            stack.enter_context(RecordingMode(dispatch.call))
            yield dispatch

    def _here(self, func: OpOverload, values: Any) -> Site:
        where = where_now(self.modules[-1])
        return site_of(func, values, where, self.modules, self.scopes, self.placed)

    def __repr__(self) -> str:
        return f"{self.region!r}_by_policy_{id(self):x}"

    def __str__(self) -> str:
        return f"{self.region} by {self.placed.policy}"


def _compiled_code_opened() -> AbstractContextManager[object]:
    """Let what ``torch.compile`` has compiled run as it was written, where operators can be cast."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    opened: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return opened


class _Kept:
    """The casts of leaves that one region keeps."""

    def __init__(self) -> None:
        self._casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if id(tensor) not in self._casts:
            with torch.enable_grad():
                self._casts[id(tensor)] = (tensor, tensor.to(dtype))
        return self._casts[id(tensor)][1]


def site_of(
    func: OpOverload,
    values: Any,
    where: Where,
    modules: tuple[str, ...],
    scopes: frozenset[int],
    placed: PlacedPolicy,
) -> Site:
    """The site of a call that this thread is making."""
    codes = codes_now(placed.codes) if placed.codes else ()
    return Site(func, where, modules, inputs_of(values), scopes, codes)


def inputs_of(values: Any) -> tuple[Fact, ...]:
    """The facts of the tensors among the arguments *values*."""
    facts = [fact_of(leaf) for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return tuple(fact for fact in facts if isinstance(fact, Fact))
