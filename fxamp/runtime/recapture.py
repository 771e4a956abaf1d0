"""Why a module was captured again, and how often it may be.

Calls are of one family if they differ in nothing but values: numbers and strings among the arguments, sizes,
what is true of the model itself.  Each family of a module is captured ``recapture_limit`` times at most, and
all families of it together eight times as often.  What comes after that runs eagerly; programs that are there
already go on serving their calls.
"""

from __future__ import annotations

import inspect
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxamp.capture.structure import Spec
from fxamp.runtime.program import Program

__all__ = ["ALL_FAMILIES", "Cause", "Recapture", "Recaptures", "family_of", "find_cause", "is_limit"]

_LOGGED = 200
_FAMILIES = 8
_LIMIT = "recapture limit"
ALL_FAMILIES = (_LIMIT,)

_PARTS = (
    "the arguments",
    "the tensors among the arguments",
    "which arguments are one tensor",
    "the gradient mode",
    "the inference mode",
    "the surrounding state of autocast",
    "the training flags",
    "hooks",
    "the default dtype",
)
_OF_A_TENSOR = ("dtype", "device", "requires_grad", "number of dimensions", "layout", "class")


@dataclass(frozen=True)
class Cause:
    """What differs from the calls before.

    Attributes:
        text: For people.
        way_out: What they can do about it, ``""`` if nothing is to be done.
    """

    text: str
    way_out: str = ""


@dataclass(frozen=True)
class Recapture:
    """One capture that was not the first of its module.

    Attributes:
        path: Dotted path of the module, ``""`` for the model itself.
        reason: What was different from the calls before.
    """

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path or 'the model'}: {self.reason}"


class Recaptures:
    """The captures of one converted model.

    Attributes:
        log: The latest of those that were not the first of their module.
    """

    def __init__(self) -> None:
        self.log: deque[Recapture] = deque(maxlen=_LOGGED)
        self._counts: Counter[Any] = Counter()

    def withdraw(self, path: str, family: Any) -> None:
        """A capture that was counted gave an error, which was raised."""
        self._counts[path, family] -= 1
        self._counts[path, ALL_FAMILIES] -= 1

    def admit(self, path: str, family: Any, cause: Cause | None, limit: int) -> tuple[Any, str] | None:
        """Count a capture of the module at *path*; if it is one too many, what is to be refused, and why."""
        for scope, most in ((family, limit), (ALL_FAMILIES, limit * _FAMILIES)):
            if self._counts[path, scope] >= most:
                return scope, _refusal(path, most, cause, limit)
        self._counts[path, family] += 1
        self._counts[path, ALL_FAMILIES] += 1
        if cause is not None:
            self.log.append(Recapture(path, cause.text))
        return None


def _refusal(path: str, count: int, cause: Cause | None, limit: int) -> str:
    lines = [f"{path or 'the model'} was captured {count} times; calls that differ again now run eagerly"]
    if cause is not None:
        lines.append(f"the latest: {cause.text}")
        lines += [cause.way_out] if cause.way_out else []
    lines.append(f"or allow more:  amp.recapture_limit = {4 * limit}")
    return "\n  ".join(lines)


def family_of(key: Any) -> Any:
    """Of a signature, what makes calls more than different in values."""
    spec, leaves, _, *modes = key
    described = tuple((dtype, device, grad, dims, cls) for dtype, device, grad, dims, _, cls in leaves)
    return (_LIMIT, _without_values(spec), described, *modes)


def is_limit(key: Any) -> bool:
    """Whether *key* is a family, not a signature."""
    return isinstance(key, tuple) and key[0] == _LIMIT


def _without_values(spec: Any) -> Any:
    if not isinstance(spec, tuple):
        return spec
    if spec[:1] in (("constant",), ("object",)):
        return spec[:2]
    return tuple(map(_without_values, spec))


# --- the cause --------------------------------------------------------------------------------------


def find_cause(
    function: Callable[..., Any],
    key: Any,
    leaves: Sequence[torch.Tensor],
    programs: Mapping[Any, Sequence[Program]],
    others: Sequence[Any],
) -> Cause | None:
    """Why no program serves a call; ``None`` for the first call of all.

    Args:
        function: The module or function.
        key: The signature of the call.
        leaves: Its tensors.
        programs: What there is, by signature.
        others: Signatures of which no program could be captured.
    """
    if programs.get(key):
        return _cause_in_model(programs[key]) or _cause_in_sizes(programs[key][0], leaves)
    known = [other for other in (*programs, *others) if other is not None and not is_limit(other)]
    if not known:
        return None
    nearest = max(reversed(known), key=lambda other: _likeness(key, other))
    return _cause_in_call(function, key, nearest)


def _cause_in_model(programs: Sequence[Program]) -> Cause | None:
    for program in programs:
        text = program.difference()
        if text.startswith("the attribute"):
            return Cause(text, "keep what changes often in a buffer (register_buffer) and compute with that")
        if text:
            return Cause(text)
    return None


def _cause_in_sizes(program: Program, leaves: Sequence[torch.Tensor]) -> Cause:
    names = [node.name for node in program.module.graph.nodes if node.op == "placeholder"]
    broken = program.guard.broken(leaves, names)
    shapes = ", ".join(f"{name}: {tuple(leaf.shape)}" for name, leaf in zip(names, leaves, strict=False))
    return Cause(
        f"the sizes {shapes} break {broken!r}",
        "pad the inputs to a few sizes, or capture all at once:  convert(..., dynamic_shapes=True)",
    )


def _likeness(one: Any, other: Any) -> tuple[bool, int]:
    same = [a == b for a, b in zip(one, other, strict=True)]
    return _without_values(one[0]) == _without_values(other[0]), sum(same)


def _cause_in_call(function: Callable[..., Any], key: Any, other: Any) -> Cause:
    if key[0] != other[0]:
        return _cause_in_arguments(key[0], other[0], _names_of(function))
    if key[1] != other[1]:
        for index, (new, old) in enumerate(zip(key[1], other[1], strict=True)):
            for what, now, was in zip(_OF_A_TENSOR, new, old, strict=True):
                if now != was:
                    return Cause(f"the {what} of input {index} is another: {now}, not {was}")
    for what, now, was in zip(_PARTS, key, other, strict=True):
        if now != was:
            plain = isinstance(now, bool)
            return Cause(f"{what}: now {now}, not {was}" if plain else f"{what} changed")
    return Cause("another call")


def _names_of(function: Callable[..., Any]) -> list[str]:
    forward = function.forward if isinstance(function, nn.Module) else function
    try:
        return list(inspect.signature(forward).parameters)
    except (TypeError, ValueError):
        return []


def _cause_in_arguments(new: Spec, old: Spec, names: list[str]) -> Cause:
    """The specs are those of ``(args, kwargs)``."""
    (args, kwargs), (old_args, old_kwargs) = new[1], old[1]
    count = len(args[1])
    names = (names + [f"args[{index}]" for index in range(len(names), count)])[:count]
    if len(old_args[1]) == count:
        for name, now, was in zip(names, args[1], old_args[1], strict=True):
            if now != was:
                return _difference(now, was, name)
    return (
        _difference(kwargs, old_kwargs, "") if args == old_args else Cause("the number of arguments differs")
    )


def _difference(new: Spec, old: Spec, where: str) -> Cause:
    kinds = new[0], old[0]
    if kinds == ("constant", "constant"):
        now, was = (spec[2] if spec[1] in (float, complex) else repr(spec[2]) for spec in (new, old))
        way_out = "pass a tensor instead of a Python number" if new[1] in (int, float, complex) else ""
        return Cause(f"the argument {where!r} is {now}, not {was}", way_out)
    if kinds == ("object", "object") and new[1] is old[1]:
        return Cause(f"the argument {where!r} is another {new[1].__name__}, or has other attributes")
    if kinds[0] is kinds[1] and isinstance(kinds[0], type) and len(new[1]) == len(old[1]):
        is_mapping = issubclass(kinds[0], dict)
        for index, (now, was) in enumerate(zip(new[1], old[1], strict=True)):
            if now == was:
                continue
            if not is_mapping:
                return _difference(now, was, f"{where}[{index}]")
            if now[:2] == was[:2]:
                return _difference(now[2], was[2], f"{where}[{now[0]!r}]" if where else str(now[0]))
    return Cause(f"the argument {where!r} has another structure" if where else "other keyword arguments")
