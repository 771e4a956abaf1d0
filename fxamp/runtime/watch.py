"""What must not have changed in a module tree for a captured program to be right.

Training flags select the program; a hook makes its module run eagerly; a module that was replaced makes
every program stale.  All three are looked at on every call, so they are gathered once into flat lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import getitem, is_

from torch import nn
from torch.nn.modules import module as nn_module

__all__ = ["ModuleWatch"]

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)
_GLOBAL_HOOKS: tuple[Mapping[int, object], ...] = tuple(
    vars(nn_module)[name]
    for name in (
        "_global_forward_pre_hooks",
        "_global_forward_hooks",
        "_global_backward_pre_hooks",
        "_global_backward_hooks",
    )
)


class ModuleWatch:
    """The modules of one tree, as they were when the watch was made."""

    def __init__(self, root: nn.Module) -> None:
        named = list(root.named_modules())
        self._attributes = [module.__dict__ for _, module in named]
        self._paths = [path for path, _ in named]
        edges = [
            (module._modules, name, child)
            for _, module in named
            for name, child in module._modules.items()
        ]
        self._dicts = [edge[0] for edge in edges]
        self._names = [edge[1] for edge in edges]
        self._children = [edge[2] for edge in edges]
        self._hooks = [attributes[name] for attributes in self._attributes for name in _HOOKS]

    def training(self) -> tuple[bool, ...]:
        """The training flag of every module."""
        return tuple([attributes["training"] for attributes in self._attributes])

    def hooked(self) -> bool:
        """Whether a hook is registered on any module of the tree, or on all modules."""
        return any(self._hooks) or any(_GLOBAL_HOOKS)

    def where_hooked(self) -> str:
        """Which modules have hooks, for a message."""
        if any(_GLOBAL_HOOKS):
            return "every module (a global hook)"
        paths = [
            path or "the root"
            for path, attributes in zip(self._paths, self._attributes, strict=True)
            if any(attributes[name] for name in _HOOKS)
        ]
        return ", ".join(paths)

    def intact(self) -> bool:
        """Whether every module still has the children it had."""
        try:
            return all(map(is_, map(getitem, self._dicts, self._names), self._children))
        except KeyError:
            return False
