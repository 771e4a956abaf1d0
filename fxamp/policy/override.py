"""An override: what the user wants of some operators, instead of what autocast would do.

==================  ========================================================================
verb                what happens to the calls that its selector means
==================  ========================================================================
keep float32        floating arguments are cast to float32
force low           floating arguments are cast to the low precision dtype
promote             to the widest dtype among them, as for autocast's promoting operators
leave               nothing: the operator gets what it is given
float32 to low      arguments are cast to float32, and float32 results to low precision
==================  ========================================================================

They act in disabled regions too.  Where several mean the same call, the last one wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fxamp.errors import PolicyError
from fxamp.policy.cast_policy import CastPolicy, OpRule
from fxamp.policy.selector import Selector
from fxamp.policy.site import Site

__all__ = ["NO_OVERRIDE", "Override", "Ruling", "Verb", "rule_on"]


class Verb(Enum):
    """What an override does; the table is in ``override.py``."""

    KEEP_FLOAT32 = "keep float32"
    FORCE_LOW = "force low"
    PROMOTE = "promote"
    LEAVE = "leave"
    FLOAT32_TO_LOW = "float32 to low"


_CASTS: Mapping[Verb, CastPolicy | None] = {
    Verb.KEEP_FLOAT32: CastPolicy.FP32,
    Verb.FORCE_LOW: CastPolicy.LOWER_PRECISION_FP,
    Verb.PROMOTE: CastPolicy.PROMOTE,
    Verb.LEAVE: None,
    Verb.FLOAT32_TO_LOW: CastPolicy.FP32,
}


@dataclass(frozen=True)
class Override:
    """One wish of the user.

    Attributes:
        verb: What to do.
        selector: To which calls.
        why: The user's reason, for the report.
        optional: Whether it may select nothing; else that is an error.
    """

    verb: Verb
    selector: Selector
    why: str = ""
    optional: bool = False

    @property
    def cast(self) -> CastPolicy | None:
        """The treatment of arguments that the verb asks for; ``None`` is to leave them alone."""
        return _CASTS[self.verb]

    def rule_for(self, op: str) -> OpRule | None:
        """The rule that takes the place of the table's row for *op*."""
        cast = self.cast
        return None if cast is None else OpRule(op, cast, frozenset(), f"override {self}")

    def __str__(self) -> str:
        return f"{self.verb.value} ({self.selector})" + (f": {self.why}" if self.why else "")

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the inverse is :meth:`from_dict`."""
        extra: dict[str, Any] = {"why": self.why} if self.why else {}
        if self.optional:
            extra["optional"] = True
        return {"verb": self.verb.value, **self.selector.as_dict(), **extra}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Override:
        """The override that *data* describes.

        Raises:
            PolicyError: It describes none, or an operator or predicate that does not exist here.
        """
        known = {"verb", "op", "module", "where", "why", "optional"}
        if unknown := sorted(data.keys() - known):
            raise PolicyError(f"an override has no {', '.join(unknown)}\n  it has {', '.join(sorted(known))}")
        try:
            verb = Verb(data["verb"])
        except (KeyError, ValueError) as error:
            verbs = ", ".join(repr(verb.value) for verb in Verb)
            raise PolicyError(
                f"an override has no verb {data.get('verb')!r}\n  use one of  {verbs}"
            ) from error
        op, module, where = (str(data.get(part, "")) for part in ("op", "module", "where"))
        selector = Selector(op, module, where)
        selector.check()
        return cls(verb, selector, str(data.get("why", "")), bool(data.get("optional", False)))


@dataclass(frozen=True)
class Ruling:
    """What the overrides say of one call.

    Attributes:
        won: The override that decides; ``None`` if none means the call.
        lost: Those that mean it too, and came before.
    """

    won: Override | None = None
    lost: tuple[Override, ...] = ()


NO_OVERRIDE = Ruling()
"""What they say where there is none."""


def rule_on(overrides: tuple[Override, ...], site: Site) -> tuple[Ruling, frozenset[int]]:
    """The ruling on the call at *site*, and which of *overrides*, by their places, mean it."""
    meant = [place for place, override in enumerate(overrides) if override.selector.matches(site, place)]
    if not meant:
        return NO_OVERRIDE, frozenset()
    chosen = [overrides[place] for place in meant]
    return Ruling(chosen[-1], tuple(chosen[:-1])), frozenset(meant)
