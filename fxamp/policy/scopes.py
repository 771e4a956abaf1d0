"""A policy on one model: which modules the selectors of its overrides mean there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType

from torch import nn

from fxamp.errors import PolicyError
from fxamp.policy.near import near_matches
from fxamp.policy.policy import Policy

__all__ = ["PlacedPolicy", "place"]


@dataclass(frozen=True, eq=False)
class PlacedPolicy:
    """A policy, and the modules that its overrides select by path or class.

    Attributes:
        policy: The policy.
        scopes: By ``id`` of a module, the places of the overrides that select it or a module above it.
        codes: Of the Python functions that overrides select.
    """

    policy: Policy
    scopes: Mapping[int, frozenset[int]]
    codes: frozenset[CodeType]

    def scopes_below(self, root: nn.Module) -> dict[str, frozenset[int]]:
        """The same by the paths that modules have below *root*, for those that are selected."""
        if not self.scopes:
            return {}
        named = root.named_modules(remove_duplicate=False)
        return {path: self.scopes[id(module)] for path, module in named if id(module) in self.scopes}


def place(policy: Policy, model: object) -> PlacedPolicy:
    """*policy* on *model*.

    Raises:
        PolicyError: An override selects a module by a path or class that *model* does not have.
    """
    named = list(model.named_modules(remove_duplicate=False)) if isinstance(model, nn.Module) else []
    found: dict[int, set[int]] = {}
    for index, override in enumerate(policy.overrides):
        selector = override.selector
        if not selector.module:
            continue
        roots = [path for path, module in named if selector.selects_module(path, module)]
        if not roots and not override.optional:
            raise PolicyError(f"no module is selected by  {override}{_near(selector.module, named)}")
        for path, module in named:
            if any(path == root or not root or path.startswith(f"{root}.") for root in roots):
                found.setdefault(id(module), set()).add(index)
    codes = [code for override in policy.overrides for code in override.selector.codes()]
    return PlacedPolicy(policy, {key: frozenset(places) for key, places in found.items()}, frozenset(codes))


def _near(wanted: str, named: list[tuple[str, nn.Module]]) -> str:
    if wanted.startswith("class:"):
        classes = {f"{type(module).__module__}.{type(module).__qualname__}" for _, module in named}
        return near_matches(wanted.removeprefix("class:"), sorted(classes))
    return near_matches(wanted.removeprefix("re:"), [path for path, _ in named if path])
