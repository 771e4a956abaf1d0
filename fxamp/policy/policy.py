"""A policy: which operators autocast casts, to what, and on which device's tensors.

A policy is a value.  Two policies with the same rows are equal; it can be hashed, copied, pickled
and used as a cache key, and nothing can change it.

    Policy.native("cuda", torch.float16)             what CUDA autocast does here
    Policy.native("cuda", torch.float16).on("cpu")   the same decisions, for CPU tensors
    policy.keep("float32", module="head")            the same, but for an override

Overrides select calls of operators (``selector.py``) and say what to do with them (``override.py``).
"""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch._ops import OpOverload

from fxamp.errors import PolicyError
from fxamp.policy.cast_policy import OpRule
from fxamp.policy.dispatcher import AUTOCAST_KEYS, autocast_key, registered_operators
from fxamp.policy.everything_low import lowered
from fxamp.policy.override import Override, Ruling, Verb, rule_on
from fxamp.policy.plan import Plan
from fxamp.policy.policy_text import policy_as_text, policy_from_text
from fxamp.policy.selector import Selector
from fxamp.policy.site import Site
from fxamp.policy.table import RULES
from fxamp.policy.versions import is_in_version, parsed

__all__ = ["LOW_DTYPES", "Policy", "RuleMap"]

LOW_DTYPES = (torch.float16, torch.bfloat16)
"""The low precision dtypes that autocast supports on every device type."""


@final
class RuleMap(Mapping[str, OpRule]):
    """Rules by operator name, immutable: equal and hashed by value, and picklable.

    (A ``types.MappingProxyType`` of a dict can be neither hashed nor pickled.)
    """

    __slots__ = ("_rules",)

    def __init__(self, rules: Mapping[str, OpRule]) -> None:
        self._rules = dict(rules)

    def __getitem__(self, op: str) -> OpRule:
        return self._rules[op]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def __hash__(self) -> int:
        return hash(frozenset(self._rules))  # the names alone: equal maps have equal names

    def __repr__(self) -> str:
        return f"RuleMap({len(self)} rules)"


@final
@dataclass(frozen=True, repr=False)
class Policy:
    """The rules of one device type's autocast, and the tensors that they act on.

    Attributes:
        device_type: The device type of the tensors that are cast; others pass through.
        low: The low precision dtype, float16 or bfloat16.
        rules: The rule of each operator, by overload name; any mapping is taken and frozen.
        table: The device type whose table this is; differs from *device_type* after ``on``.
        overrides: What the user wants otherwise; the last that means a call wins.
        plan: The graphs that it made before, when it comes from a plan file.

    Raises:
        PolicyError: The dtype is not one of ``LOW_DTYPES``, or there is no such device type.
    """

    device_type: str
    low: torch.dtype
    rules: Mapping[str, OpRule]
    table: str
    overrides: tuple[Override, ...] = ()
    plan: Plan | None = None

    def __post_init__(self) -> None:
        _check_device_type(self.device_type)
        _check_low(self.low)
        if not isinstance(self.rules, RuleMap):
            object.__setattr__(self, "rules", RuleMap(self.rules))

    @classmethod
    def native(
        cls, device_type: str, dtype: torch.dtype | None = None, *, torch_version: str | None = None
    ) -> "Policy":
        """The policy of ``torch.autocast(device_type, dtype)``, in the installed torch or an older one.

        Warns (``UserWarning``) where the dispatcher registers operators that the table lacks.

        Args:
            device_type: ``"cuda"``, ``"cpu"``, ``"xpu"``, ``"mps"`` or ``"mtia"``.
            dtype: float16 or bfloat16; by default ``torch.get_autocast_dtype(device_type)``.
            torch_version: Pins the list of an older version, ``"2.11"``, say, in which ``rms_norm`` had no
                rule.  Operators that the installed torch lacks have no rule either way.

        Raises:
            PolicyError: There is no autocast for the device type, or not with that dtype, or the version is
                not covered.

        Example:
            >>> Policy.native("cpu", torch.bfloat16).rule("aten::mm").cast
            <CastPolicy.LOWER_PRECISION_FP: 'lower_precision_fp'>
        """
        autocast_key(device_type)  # raises for a device type without autocast
        low = torch.get_autocast_dtype(device_type) if dtype is None else dtype
        policy = _native(device_type, low)
        if torch_version is None:
            return policy
        version = parsed(torch_version)
        rules = {op: rule for op, rule in policy.rules.items() if is_in_version(op, version)}
        return replace(policy, rules=rules) if len(rules) < len(policy.rules) else policy

    @classmethod
    def everything_low(cls, device_type: str, dtype: torch.dtype | None = None) -> "Policy":
        """Low precision wherever it can be had, but for norms and losses (what apex called O2).

        Against :meth:`native`, operators that autocast computes in float32 (``exp``, ``pow``, ``sum``,
        ``softmax``, distances, ...) are computed in low precision, unless they are a norm or a loss; those
        are kept in float32 also where autocast has no rule for them (``layer_norm`` on the CPU).  Parameters
        stay in float32, as for autocast; ``batch_norm`` reads a low precision input with its own float32
        parameters.  Sums over more than a few thousand elements lose digits, in float16 they overflow.

        Args and errors as for :meth:`native`.
        """
        native = cls.native(device_type, dtype)
        return replace(native, rules=lowered(native.rules, device_type))

    # --- overrides ----------------------------------------------------------------------------------

    def keep(
        self,
        dtype: Literal["float32"],
        *,
        op: Any = None,
        module: Any = None,
        where: Any = None,
        returns: Literal["low"] | None = None,
        why: str = "",
        optional: bool = False,
    ) -> "Policy":
        """This policy, but the selected calls compute in float32.

        Selected is what all of *op*, *module* and *where* mean; without *op* that is every operator that
        computes, while views, moves and in-place operators take the dtype that they are given.

        Args:
            dtype: ``"float32"``.
            op: An ATen operator (``torch.ops.aten.softmax.int``, ``"aten::softmax"``), a builtin
                (``torch.softmax``, every call of the operator), a Python function
                (``torch.nn.functional.layer_norm``, all that is called in it) or a custom operator.
            module: A path with globs (``"encoder.*"``), a compiled regular expression, or a class; with
                everything below.
            where: ``"model.py:120"``, ``"model.py:100-140"``, ``"model.py:forward"``, or a predicate that is
                called with a :class:`~fxamp.policy.site.Site`.
            returns: ``"low"`` casts float32 results to low precision.
            why: The reason, for the report.
            optional: Whether it may select nothing; else a model where it does is refused.

        Raises:
            PolicyError: The dtype is another, or the selection names nothing.

        Example:
            >>> print(Policy.native("cpu", torch.bfloat16).keep("float32", module="head").overrides[0])
            keep float32 (module='head')
        """
        _expect("keep", dtype, "float32")
        if returns is not None:
            _expect("keep(..., returns=...)", returns, "low")
        verb = Verb.KEEP_FLOAT32 if returns is None else Verb.FLOAT32_TO_LOW
        return self._with(Override(verb, Selector.of(op, module, where), why, optional))

    def force(
        self,
        dtype: Literal["low"],
        *,
        op: Any = None,
        module: Any = None,
        where: Any = None,
        why: str = "",
        optional: bool = False,
    ) -> "Policy":
        """This policy, but the selected calls compute in low precision; arguments as for :meth:`keep`."""
        _expect("force", dtype, "low")
        return self._with(Override(Verb.FORCE_LOW, Selector.of(op, module, where), why, optional))

    def promote(
        self, *, op: Any = None, module: Any = None, where: Any = None, why: str = "", optional: bool = False
    ) -> "Policy":
        """This policy, but the selected calls compute in the widest dtype among their arguments."""
        return self._with(Override(Verb.PROMOTE, Selector.of(op, module, where), why, optional))

    def leave(
        self, *, op: Any = None, module: Any = None, where: Any = None, why: str = "", optional: bool = False
    ) -> "Policy":
        """This policy, but the selected calls get their arguments as they are."""
        return self._with(Override(Verb.LEAVE, Selector.of(op, module, where), why, optional))

    def _with(self, override: Override) -> "Policy":
        return replace(self, overrides=(*self.overrides, override))

    def ruling(self, site: Site) -> tuple[Ruling, frozenset[int]]:
        """What the overrides say of the call at *site*, and which of them, by their places, mean it."""
        return rule_on(self.overrides, site)

    # --- rules --------------------------------------------------------------------------------------

    @property
    def is_torchs_own(self) -> bool:
        """Whether the installed torch's autocast carries out this very policy."""
        if self.overrides or self.device_type not in AUTOCAST_KEYS:
            return False
        native = _native(self.device_type, self.low).rules
        return self.rules is native or self.rules == native

    def rule(self, op: OpOverload | str) -> OpRule | None:
        """The rule of *op*, an overload or its name; None where autocast leaves it alone."""
        return self.rules.get(op if isinstance(op, str) else op.name())

    def on(self, device_type: str) -> "Policy":
        """The same rules and dtype, acting on the tensors of another device type.

        Example:
            >>> Policy.native("cuda", torch.float16).on("cpu").table
            'cuda'
        """
        return replace(self, device_type=device_type)

    # --- text ---------------------------------------------------------------------------------------

    def to_json(self) -> str:
        """This policy as JSON: dtype, device types, every rule and every override; not its plan.

        Raises:
            PolicyError: A predicate of an override has no name to import it by.
        """
        return policy_as_text(self)

    @classmethod
    def from_json(cls, text: str) -> "Policy":
        """The policy that :meth:`to_json` wrote.

        Raises:
            PolicyError: *text* is no policy, or names what this torch does not have.
        """
        return cls(**policy_from_text(text))

    @classmethod
    def from_plan(cls, path: str | Path) -> "Policy":
        """The policy of a plan file, which remembers the graphs that it made.

        A model that is converted with it gets the same graphs; where one is not the same, a
        ``PlanWarning`` says what differs.

        Raises:
            PolicyError: The file is no plan.
            OSError: It cannot be read.
        """
        plan = Plan.read(path)
        return replace(cls.from_json(plan.policy), plan=plan)

    def __repr__(self) -> str:
        whose = "" if self.table == self.device_type else f" by the table of {self.table}"
        count = len(self.overrides)
        more = f", {count} override{'s' if count > 1 else ''}" if count else ""
        return f"Policy({self.device_type}{whose}, {self.low}, {len(self.rules)} rules{more})"


def _expect(verb: str, given: str, wanted: str) -> None:
    if given != wanted:
        raise PolicyError(f"{verb} takes {wanted!r}, not {given!r}")


@lru_cache
def _native(device_type: str, low: torch.dtype) -> Policy:
    names = registered_operators(device_type)
    rules = {row.op: row for row in RULES if device_type in row.devices}
    if unknown := sorted(names - rules.keys()):
        warnings.warn(
            f"torch {torch.__version__} autocasts operators on {device_type} that fxamp has no rule for: "
            f"{', '.join(unknown)}; they will not be cast",
            UserWarning,
            stacklevel=3,  # the caller of Policy.native
        )
    return Policy(device_type, low, {op: rule for op, rule in rules.items() if op in names}, device_type)


def _check_device_type(device_type: str) -> None:
    try:
        known = torch.device(device_type).type
    except RuntimeError as error:
        raise PolicyError(f"torch knows no device type {device_type!r}") from error
    if known != device_type:
        raise PolicyError(
            f"a policy acts on all devices of a type, not on {device_type!r}\n  give it the type:  {known!r}"
        )


def _check_low(low: torch.dtype) -> None:
    if low not in LOW_DTYPES:
        raise PolicyError(
            f"autocast has no {low} mode; the low precision dtype is one of {LOW_DTYPES}\n"
            f"  for example:  Policy.native('cuda', torch.bfloat16)"
        )
