"""A policy: which operators autocast casts, to what, and on which device's tensors.

A policy is a value.  Two policies with the same rows are equal; it can be hashed, copied, pickled
and used as a cache key, and nothing can change it.

    Policy.native("cuda", torch.float16)             what CUDA autocast does here
    Policy.native("cuda", torch.float16).on("cpu")   the same decisions, for CPU tensors
"""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import final

import torch
from torch._ops import OpOverload

from fxamp.errors import PolicyError
from fxamp.policy.cast_policy import OpRule
from fxamp.policy.dispatcher import autocast_key, registered_operators
from fxamp.policy.table import RULES

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

    Raises:
        PolicyError: The dtype is not one of ``LOW_DTYPES``, or there is no such device type.
    """

    device_type: str
    low: torch.dtype
    rules: Mapping[str, OpRule]
    table: str

    def __post_init__(self) -> None:
        _check_device_type(self.device_type)
        _check_low(self.low)
        object.__setattr__(self, "rules", RuleMap(self.rules))

    @classmethod
    def native(cls, device_type: str, dtype: torch.dtype | None = None) -> "Policy":
        """The policy of ``torch.autocast(device_type, dtype)`` in the installed torch.

        Warns (``UserWarning``) where the dispatcher registers operators that the table lacks.

        Args:
            device_type: ``"cuda"``, ``"cpu"``, ``"xpu"``, ``"mps"`` or ``"mtia"``.
            dtype: float16 or bfloat16; by default ``torch.get_autocast_dtype(device_type)``.

        Raises:
            PolicyError: There is no autocast for the device type, or not with that dtype.

        Example:
            >>> Policy.native("cpu", torch.bfloat16).rule("aten::mm").cast
            <CastPolicy.LOWER_PRECISION_FP: 'lower_precision_fp'>
        """
        autocast_key(device_type)  # raises for a device type without autocast
        return _native(device_type, torch.get_autocast_dtype(device_type) if dtype is None else dtype)

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

    def __repr__(self) -> str:
        whose = "" if self.table == self.device_type else f" by the table of {self.table}"
        return f"Policy({self.device_type}{whose}, {self.low}, {len(self.rules)} rules)"


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
