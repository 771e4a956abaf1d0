"""What must not have changed in a module tree for a captured program to be right.

Training flags select the program; a hook makes its module run eagerly; a module that was replaced makes
every program stale; a tensor of another dtype, device or size, or tied to others than before, makes one
program stale.  All are looked at on every call, so they are gathered once into flat lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from operator import getitem, is_

import torch
from torch import nn
from torch._C._dynamo.guards import TensorGuards
from torch.nn.modules import module as nn_module

from fxamp.capture.known_hooks import HOOK_DICTS, all_known
from fxamp.ir.modules import is_opaque
from fxamp.runtime.cells import Cells

__all__ = ["ModuleWatch", "SealedWatch", "Slot", "TensorWatch", "tensor_check"]

Slot = tuple[dict[str, torch.Tensor], str]
"""Where a tensor is read from: the dict that holds it, and its name there."""

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
        everything = list(root.named_modules())
        named = [(path, module) for path, module in everything if not is_opaque(module)]
        self._opaque = [module for _, module in everything if is_opaque(module)]
        self._modules = [module for _, module in everything]
        self._types = list(map(type, self._modules))
        self._everything = [path for path, _ in everything]
        self._attributes = [module.__dict__ for _, module in named]
        self._paths = [path for path, _ in named]
        child_dicts = [attributes["_modules"] for attributes in self._attributes]
        self._parents = [children for children in child_dicts if children]
        self._childless = [children for children in child_dicts if not children]
        self._children = [child for children in self._parents for child in children.values()]
        self._families = [dict(children) for children in child_dicts]
        self._hooks = [attributes[name] for attributes in self._attributes for name in _HOOKS]

    def training(self) -> tuple[bool, ...]:
        """The training flag of every module."""
        flags = tuple(map(getitem, self._attributes, repeat("training")))
        return flags + tuple([module.training for module in self._opaque]) if self._opaque else flags

    def hooks(self) -> tuple[int, ...]:
        """The hooks that are registered on any module of the tree, or on all modules, by ``id``."""
        if not (any(self._hooks) or any(_GLOBAL_HOOKS)):
            return ()
        return tuple(id(hook) for hooks in (*self._hooks, *_GLOBAL_HOOKS) for hook in hooks.values())

    def where_hooked(self) -> str:
        """Which modules have hooks that are not recorded, for a message; ``""`` if none has."""
        if any(_GLOBAL_HOOKS):
            return "every module (a global hook)"
        paths = [
            path or "the module itself"
            for path, attributes in zip(self._paths, self._attributes, strict=True)
            if any(attributes[name] and not _recorded(name, attributes[name]) for name in _HOOKS)
        ]
        return ", ".join(paths)

    def intact(self) -> bool:
        """Whether every module still has its class and the children that it had, and no others."""
        if any(self._childless) or list(map(type, self._modules)) != self._types:
            return False
        now = list(chain.from_iterable([children.values() for children in self._parents]))
        return len(now) == len(self._children) and all(map(is_, now, self._children))

    def gather(self, cells: Cells) -> None:
        """Add the modules as they are to *cells*; while those are the same, so is all of the above."""
        cells.add_classes(self._modules)
        for children in (*self._parents, *self._childless):
            cells.add_values(children)
        for attributes in self._attributes:
            cells.add_item(attributes, "training", attributes["training"])
        for module in self._opaque:
            cells.add_attribute(module, "training", module.training)
        for hooks in (*self._hooks, *_GLOBAL_HOOKS):
            cells.add_values(hooks)

    def difference(self) -> str:
        """Which module was replaced, for people; ``""`` if none was."""
        for path, module, cls in zip(self._everything, self._modules, self._types, strict=True):
            if type(module) is not cls:
                return f"the class of {path or 'the model'} is {type(module).__name__}, not {cls.__name__}"
        for path, attributes, before in zip(self._paths, self._attributes, self._families, strict=True):
            now = attributes["_modules"]
            for name in [*now, *before]:
                if now.get(name) is not before.get(name) or (name in now) != (name in before):
                    what = "new" if name not in before else "gone" if name not in now else "another"
                    return f"the module {f'{path}.{name}'.strip('.')!r} is {what}"
            if list(now) != list(before):
                return f"the modules in {path or 'the model'} have another order"
        return ""


class SealedWatch(ModuleWatch):
    """The modules of a tree that nobody outside reaches: only hooks on all modules can come and go."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__(root)
        self._own = super().hooks()

    def training(self) -> tuple[bool, ...]:
        """They are the ones that the watch was made with."""
        return ()

    def hooks(self) -> tuple[int, ...]:
        """The hooks that were registered on the tree, and those that now are on all modules."""
        return super().hooks() if any(_GLOBAL_HOOKS) else self._own

    def intact(self) -> bool:
        """Always."""
        return True

    def gather(self, cells: Cells) -> None:
        """Add the hooks on all modules to *cells*."""
        for hooks in _GLOBAL_HOOKS:
            cells.add_values(hooks)


def _recorded(name: str, hooks: Mapping[int, object]) -> bool:
    return name in HOOK_DICTS and all_known(hooks)


class TensorWatch:
    """The tensors that a program reads, as they were when it was captured.

    Args:
        slots: Where the program reads them.
        root: The module tree; the other places in it that held one of them must go on doing so.
    """

    def __init__(self, slots: Sequence[Slot], root: nn.Module) -> None:
        self._slots = tuple(slots)
        tensors = [holder[name] for holder, name in self._slots]
        self._facts = [_facts(tensor) for tensor in tensors]
        self._distinct = len(set(map(id, tensors)))
        self._unchanged = tensor_check(tensors)
        index_of = {id(tensor): index for index, tensor in enumerate(tensors)}
        own = {(id(holder), name) for holder, name in self._slots}
        self._ties = tuple(
            (holder, name, index_of[id(holder[name])])
            for holder, name in _slots_below(root)
            if id(holder[name]) in index_of and (id(holder), name) not in own
        )
        self._holders, self._names = [h for h, _ in self._slots], [n for _, n in self._slots]
        self._all_holders = self._holders + [holder for holder, _, _ in self._ties]
        self._all_names = self._names + [name for _, name, _ in self._ties]
        self._ids: list[int] = []

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to look at."""
        return not self._slots

    def read(self) -> list[torch.Tensor] | None:
        """The tensors, read now; ``None`` if they are no longer what was captured."""
        try:
            tensors = list(map(getitem, self._holders, self._names))
            is_quick = self._ids == list(map(id, map(getitem, self._all_holders, self._all_names)))
            if is_quick and self._unchanged(*tensors):
                return tensors
        except (KeyError, AttributeError, TypeError):  # removed, or set to None
            return None
        return tensors if self._agree(tensors) else None

    def _agree(self, tensors: list[torch.Tensor]) -> bool:
        """Compare the facts; afterwards the same objects, of which a test in C++ says the same, will do."""
        try:
            if not self._unchanged(*tensors):
                if [_facts(tensor) for tensor in tensors] != self._facts:
                    return False
                self._unchanged = tensor_check(tensors)  # for the present state of autocast
        except (AttributeError, TypeError):
            return False
        if len(set(map(id, tensors))) != self._distinct:
            return False
        if any(holder.get(name) is not tensors[index] for holder, name, index in self._ties):
            return False
        self._ids = list(map(id, map(getitem, self._all_holders, self._all_names)))
        return True

    def difference(self) -> str:
        """What has changed, for people; ``""`` if nothing has."""
        for (holder, name), facts in zip(self._slots, self._facts, strict=True):
            tensor = holder.get(name)
            if not isinstance(tensor, torch.Tensor):
                return f"the tensor {name!r} is gone"
            for was, now, what in zip(facts, _facts(tensor), _FACTS, strict=True):
                if was != now:
                    return f"the {what} of the tensor {name!r} is {now}, not {was}"
        return "" if self.read() is not None else "tensors were tied to each other, or untied"


_FACTS = ("class", "requires_grad", "dtype", "device", "shape", "stride")


def _facts(tensor: torch.Tensor) -> tuple[object, ...]:
    strides = tensor.stride() if tensor.layout is torch.strided else ()
    return type(tensor), tensor.requires_grad, tensor.dtype, tensor.device, tensor.shape, strides


def tensor_check(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """One test in C++, ``check(*others)``: where it is true, they are in all respects like *tensors*.

    Class, dtype, device, layout, ``requires_grad``, sizes and strides.  It is false, too, where the state of
    autocast or inference mode is not the present one.
    """
    if not tensors:
        return lambda: True
    try:
        guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    except RuntimeError:  # a layout without strides
        return lambda *tensors: False
    check: Callable[..., bool] = guards.check
    return check


def _slots_below(root: nn.Module) -> Iterator[Slot]:
    for module in root.modules():
        if is_opaque(module):
            continue
        attributes = module.__dict__
        for holder in (attributes["_parameters"], attributes["_buffers"], attributes):
            yield from ((holder, name) for name, value in holder.items() if isinstance(value, torch.Tensor))
