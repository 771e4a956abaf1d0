"""A policy as text: all its rules, grouped by what they do, and its overrides.

The reasons of rows that the table has are not written; they are looked up again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from fxamp.errors import PolicyError
from fxamp.policy.cast_policy import CastPolicy, OpRule
from fxamp.policy.override import Override
from fxamp.policy.table import RULES

if TYPE_CHECKING:
    from fxamp.policy.policy import Policy

__all__ = ["policy_as_text", "policy_from_text"]

_KEYS = frozenset({"device_type", "low", "rules", "reasons", "table", "overrides"})


def policy_as_text(policy: Policy) -> str:
    """JSON with *policy*'s fields."""
    groups: dict[str, list[str]] = {}
    for op, rule in sorted(policy.rules.items()):
        groups.setdefault(rule.cast.value, []).append(op)
    data = {
        "device_type": policy.device_type,
        "table": policy.table,
        "low": str(policy.low).removeprefix("torch."),
        "overrides": [override.as_dict() for override in policy.overrides],
        "rules": {cast: " ".join(names) for cast, names in sorted(groups.items())},
        "reasons": {op: rule.why for op, rule in sorted(policy.rules.items()) if _row_of(rule) is None},
    }
    return json.dumps(data, indent=1)


def policy_from_text(text: str) -> dict[str, Any]:
    """The fields of the policy that :func:`policy_as_text` wrote.

    Raises:
        PolicyError: *text* is something else.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise PolicyError(f"a policy is written as JSON, and this is none: {error}") from error
    if not isinstance(data, dict) or not data.keys() <= _KEYS or not {"device_type", "low"} <= data.keys():
        raise PolicyError(f"a policy has the keys {', '.join(sorted(_KEYS))}; this has others")
    table = str(data.get("table", data["device_type"]))
    return {
        "device_type": data["device_type"],
        "low": getattr(torch, str(data["low"]), None),
        "rules": _rules(data.get("rules", {}), data.get("reasons", {}), table),
        "table": table,
        "overrides": tuple(Override.from_dict(item) for item in data.get("overrides", ())),
    }


def _rules(groups: Mapping[str, str], reasons: Mapping[str, str], table: str) -> dict[str, OpRule]:
    rules = {}
    for name, operators in groups.items():
        try:
            cast = CastPolicy(name)
        except ValueError as error:
            known = ", ".join(cast.value for cast in CastPolicy)
            raise PolicyError(f"no rule does {name!r}\n  use one of  {known}") from error
        for op in operators.split():
            bare = OpRule(op, cast, frozenset({table}), reasons.get(op, ""))
            rules[op] = bare if op in reasons else _row_of(bare) or bare
    return rules


def _row_of(rule: OpRule) -> OpRule | None:
    """The row of the table that does the same."""
    for row in _ROWS.get(rule.op, ()):
        if (
            row.cast is rule.cast
            and (row == rule or rule.devices & row.devices)
            and rule.why in ("", row.why)
        ):
            return row
    return None


_ROWS: Mapping[str, tuple[OpRule, ...]] = {
    op: tuple(rows) for op, rows in groupby(sorted(RULES, key=attrgetter("op")), key=attrgetter("op"))
}
