"""A copy of a module tree that shares the tensors, for ``forward`` to run on while it is recorded.

The user's modules are never touched: every module of the tree is copied with its attribute dicts and its
plain containers, bound methods are bound to the copies, tensors and all other objects are shared.  What
``forward`` assigns to ``self`` lands in the copy; comparing copy and original afterwards tells what a
call would have changed.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from fxamp.capture.attribute_reads import Origin
from fxamp.capture.known_hooks import HOOK_DICTS, INSTALLED, all_known
from fxamp.capture.sources import Place
from fxamp.errors import CaptureError
from fxamp.ir.modules import is_opaque

__all__ = ["ChangedModelError", "Mirror", "Rebinding"]


class ChangedModelError(CaptureError):
    """The call changes the model in a way that a graph cannot replay; the next one may find it done."""


@dataclass(frozen=True)
class Rebinding:
    """``forward`` put a new tensor in *place* (``self.x = new``)."""

    place: Place
    tensor: torch.Tensor


class Mirror:
    """The copied tree.

    Args:
        root: The user's module.
        enter: Called as ``enter(path)`` when the ``forward`` of the module at *path* begins.
        leave: Called when it ends, also on an exception.

    Attributes:
        root: The copy of *root*.
        origins: By ``id`` of a copied module, the one that it stands for.

    Raises:
        CaptureError: A module cannot be copied (a scripted one).
    """

    def __init__(self, root: nn.Module, enter: Callable[[str], None], leave: Callable[[], None]) -> None:
        self._pairs: list[tuple[str, nn.Module, nn.Module]] = []
        self._copies: dict[int, Any] = {}
        self._paths = {id(module): path for path, module in root.named_modules()}
        self.origins: dict[int, Origin] = {}
        self._enter, self._leave = enter, leave
        self.root: nn.Module = self._copy(root)

    def _copy(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value
        if id(value) in self._copies:
            return self._copies[id(value)]
        if isinstance(value, nn.Module):
            return self._copy_module(value)
        if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
            return MethodType(value.__func__, self._copy(value.__self__))
        if type(value) is functools.partial:
            function, args, keywords = (self._copy(part) for part in (value.func, value.args, value.keywords))
            return functools.partial(function, *args, **keywords)
        return self._copy_container(value)

    def _copy_container(self, value: Any) -> Any:
        kind = type(value)
        if kind in (dict, OrderedDict, defaultdict):
            copied = value.copy()
            self._copies[id(value)] = copied
            for key, item in value.items():
                copied[key] = self._copy(item)
            return copied
        if kind in (list, set, deque):
            copied = value.copy()
            self._copies[id(value)] = copied
            if kind is list:
                copied[:] = [self._copy(item) for item in value]
            return copied
        if kind is tuple:
            return tuple(self._copy(item) for item in value)
        return value

    def _copy_module(self, module: nn.Module) -> nn.Module:
        path = self._paths.get(id(module), "")
        if is_opaque(module):
            raise CaptureError(f"module {path!r} is compiled ({type(module).__name__}): no Python to record")
        # eager code may have put a stand-in of its child into a module that it made
        copied: nn.Module = object.__new__(getattr(type(module), "_stands_for", type(module)))
        self._copies[id(module)] = copied
        self.origins[id(copied)] = Origin(module, self._paths.get(id(module)))
        attributes = {key: self._copy(value) for key, value in module.__dict__.items()}
        object.__setattr__(copied, "__dict__", attributes)
        self._pairs.append((path, module, copied))
        attributes["forward"] = self._tracked(path, attributes.get("forward", copied.forward))
        return copied

    def _tracked(self, path: str, forward: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(forward)
        def tracked(*args: object, **kwargs: object) -> object:
            self._enter(path)
            try:
                return forward(*args, **kwargs)
            finally:
                self._leave()

        return tracked

    def rebindings(self) -> list[Rebinding]:
        """The tensors that ``forward`` assigned to attributes.

        Raises:
            CaptureError: It changed another attribute, which a graph cannot replay.
        """
        found: list[Rebinding] = []
        for path, module, copied in self._pairs:
            for kind in ("_parameters", "_buffers", "_modules", ""):
                before = module.__dict__[kind] if kind else module.__dict__
                after = copied.__dict__[kind] if kind else copied.__dict__
                found += self._compare(path, kind, before, after)
        return found

    def _compare(
        self, path: str, kind: str, before: dict[str, Any], after: dict[str, Any]
    ) -> list[Rebinding]:
        own = () if kind else ("_parameters", "_buffers", "_modules", "forward")
        found = []
        for name in [*after, *(name for name in before if name not in after)]:
            if name in own:
                continue
            place = Place(path, kind, name)
            if name in INSTALLED:
                continue
            if name not in after or (name not in before and not isinstance(after[name], torch.Tensor)):
                raise ChangedModelError(f"forward adds or removes the attribute {place.qualified!r}")
            old, new = before.get(name), after[name]
            if name in HOOK_DICTS and all_known(new):
                continue
            if isinstance(new, torch.Tensor) and new is not old:
                found.append(Rebinding(place, new))
            elif not self._alike(old, new):
                raise ChangedModelError(f"forward changes the attribute {place.qualified!r}")
        return found

    def _alike(self, old: Any, new: Any) -> bool:
        if old is new or (self._copies.get(id(old)) is new and isinstance(old, nn.Module)):
            return True
        if isinstance(old, torch.Tensor) or isinstance(new, torch.Tensor) or type(old) is not type(new):
            return False
        if isinstance(old, (dict, OrderedDict, defaultdict)):
            return list(old) == list(new) and all(self._alike(old[key], new[key]) for key in old)
        if isinstance(old, (list, tuple, deque)):
            return len(old) == len(new) and all(self._alike(a, b) for a, b in zip(old, new, strict=True))
        if isinstance(old, MethodType):
            return old.__func__ is new.__func__
        if type(old) is functools.partial:
            return self._alike(old.func, new.func)
        if isinstance(old, (int, float, str, complex, bytes, set, frozenset)):
            return bool(old == new)
        return False
