r"""A selector: which calls of operators an override is about.

All parts that are given must match.  A selector is a value and made of text, so it can be written to a file:

===========  ======================================================================================
``op``       ``aten::softmax.int`` one overload, ``aten::softmax`` all of them,
             ``torch.nn.functional.layer_norm`` a Python function and all that is called inside it
``module``   ``encoder.*.attention`` a path with globs, ``re:layers\.[0-3]$`` a regular expression,
             ``class:torch.nn.modules.normalization.LayerNorm`` a class and those derived from it;
             in each case with everything below
``where``    ``model.py``, ``model.py:120``, ``model.py:100-140``, ``model.py:forward`` the source line,
             ``when:package.module:function`` a predicate that is given the :class:`Site`
===========  ======================================================================================
"""

from __future__ import annotations

import fnmatch
import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket

from fxamp.errors import PolicyError
from fxamp.policy.near import near_matches
from fxamp.policy.passive import is_passive, why_passive
from fxamp.policy.site import Site

__all__ = ["Predicate", "Selector"]

Predicate = Callable[[Site], bool]

_LINE = re.compile(r"(?P<file>[^:]+?)(:(?P<first>\d+)(-(?P<last>\d+))?|:(?P<function>[A-Za-z_<][^\s:]*))?")


@dataclass(frozen=True)
class Selector:
    """Which calls are meant; made by :meth:`of`.

    Attributes:
        op: An operator or function, see above; ``""`` for all.
        module: A path, regular expression or class; ``""`` for all.
        where: A source line or predicate; ``""`` for all.
        predicate: The predicate itself; two selectors are equal if they name the same one.
    """

    op: str = ""
    module: str = ""
    where: str = ""
    predicate: Predicate | None = field(default=None, repr=False)

    @classmethod
    def of(cls, op: Any = None, module: Any = None, where: Any = None) -> Selector:
        """The selector for what a user gives to a verb of :class:`~fxamp.policy.Policy`.

        Raises:
            PolicyError: Nothing is selected by, or what is given names no operator, function, module or line.
        """
        if op is None and module is None and where is None:
            raise PolicyError("an override selects by op=, module= or where=, and none of them is given")
        predicate = where if callable(where) else None
        place = _name_of_predicate(where) if predicate is not None else str(where or "")
        selector = cls(_name_of_operator(op), _name_of_module(module), place, predicate)
        selector.check()
        return selector

    def check(self) -> None:
        """Raise ``PolicyError`` where a part names nothing that there could be."""
        if self.op:
            _check_operator(self.op)
        if self.module.startswith("re:"):
            _compiled(self.module)
        if self.where and self.predicate is None and not self.where.startswith("when:"):
            _line(self.where)

    # --- matching -----------------------------------------------------------------------------------

    def matches(self, site: Site, place: int) -> bool:
        """Whether the call at *site* is meant by this, the selector of the override at *place*."""
        if self.op:
            if not _is_called(self.op, site):
                return False
        elif is_passive(site.operator):
            return False
        if self.module and place not in site.scopes:
            return False
        return not self.where or self._is_there(site)

    def _is_there(self, site: Site) -> bool:
        if self.where.startswith("when:"):
            predicate = self.predicate or _predicate(self.where)
            return bool(predicate(site))
        file, first, last, function = _line(self.where)
        where = site.where
        if where.file != file and not where.file.endswith(f"/{file}"):
            return False
        if function:
            return where.function == function
        return not first or first <= where.line <= last

    def selects_module(self, path: str, module: nn.Module) -> bool:
        """Whether ``module`` means the module at *path* itself, or the class it is of."""
        if self.module.startswith("class:"):
            wanted = self.module.removeprefix("class:")
            return any(_class_name(base) == wanted for base in type(module).__mro__)
        if self.module.startswith("re:"):
            return bool(_compiled(self.module).search(path))
        return fnmatch.fnmatchcase(path, self.module)

    def codes(self) -> tuple[CodeType, ...]:
        """The code of the Python function that ``op`` names."""
        function = _function(self.op) if self.op and "::" not in self.op else None
        return (function.__code__,) if isinstance(function, FunctionType) else ()

    # --- text ---------------------------------------------------------------------------------------

    def __str__(self) -> str:
        parts = (("op", self.op), ("module", self.module), ("where", self.where))
        return ", ".join(f"{name}={text!r}" for name, text in parts if text)

    def as_dict(self) -> dict[str, str]:
        """The parts that are given; a predicate by its name.

        Raises:
            PolicyError: The predicate cannot be imported by a name, so no file can hold it.
        """
        if self.predicate is not None and _predicate_or_none(self.where) is not self.predicate:
            raise PolicyError(
                f"the predicate {self.where.removeprefix('when:')} cannot be imported, so it cannot be "
                "written down\n  define it at the top level of a module"
            )
        parts = (("op", self.op), ("module", self.module), ("where", self.where))
        return {name: text for name, text in parts if text}


# --- operators and functions --------------------------------------------------------------------------


def _name_of_operator(op: Any) -> str:
    if op is None:
        return ""
    if isinstance(op, str):
        return op if "::" in op else _name_of_operator(_function(op))
    if isinstance(op, OpOverload):
        return str(op.name())
    if isinstance(op, OpOverloadPacket):
        return str(op._qualified_op_name)
    qualified = getattr(op, "_qualname", None)  # torch.library.custom_op
    if isinstance(qualified, str) and "::" in qualified:
        return qualified
    name = getattr(op, "__name__", "")
    if isinstance(op, FunctionType) and "<" not in op.__qualname__:
        return f"{op.__module__}.{op.__qualname__}"
    if callable(op) and hasattr(torch.ops.aten, name):
        return f"aten::{name}"
    raise PolicyError(
        f"op= takes an operator, a function at the top level of a module, or the name of one, not {op!r}"
    )


def _is_called(op: str, site: Site) -> bool:
    if "::" not in op:
        return any(code in site.codes for code in _codes_of(op)) and not is_passive(site.operator)
    if op == site.op:
        return True
    return "." not in op and site.op.partition(".")[0] == op and not is_passive(site.operator)


@cache
def _codes_of(op: str) -> tuple[CodeType, ...]:
    return Selector(op=op).codes()


def _check_operator(op: str) -> None:
    if "::" not in op:
        return  # it was imported
    overloads = [overload for overload in _overloads() if overload == op or overload.partition(".")[0] == op]
    if not overloads:
        known = _overloads() if "." in op else [overload.partition(".")[0] for overload in _overloads()]
        raise PolicyError(f"torch has no operator {op!r}{near_matches(op, known)}")
    active = [name for name in overloads if not is_passive(_overload(name))]
    if not active:
        functional = [name for name in overloads if not _overload(name)._schema.is_mutable]
        reason = why_passive(_overload((functional or overloads)[0]))
        raise PolicyError(
            f"the precision of {op} cannot be chosen: it {reason}\n  select what computes instead"
        )


def _overloads() -> list[str]:
    return list(torch._C._dispatch_get_all_op_names())


def _overload(name: str) -> OpOverload:
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    found: OpOverload = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    return found


def _function(dotted: str) -> Any:
    """The function that *dotted* names; of ``torch``'s builtins the operator they call."""
    parts = dotted.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for name in parts[cut:]:
            value = getattr(value, name, None)
        if value is not None:
            return value
    raise PolicyError(
        f"there is no function {dotted!r} to import\n  an operator is named like 'aten::softmax.int'"
    )


# --- modules and lines --------------------------------------------------------------------------------


def _name_of_module(module: Any) -> str:
    if module is None:
        return ""
    if isinstance(module, str):
        if not module:
            raise PolicyError("module='' selects nothing; leave it out to select the whole model")
        return module
    if isinstance(module, re.Pattern):
        return f"re:{module.pattern}"
    if isinstance(module, type) and issubclass(module, nn.Module):
        return f"class:{_class_name(module)}"
    raise PolicyError(f"module= takes a path, a compiled regular expression or a class, not {module!r}")


def _class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


@cache
def _compiled(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text.removeprefix("re:"))
    except re.error as error:
        raise PolicyError(f"module={text!r} is no regular expression: {error}") from error


@cache
def _line(text: str) -> tuple[str, int, int, str]:
    match = _LINE.fullmatch(text)
    if match is None:
        raise PolicyError(
            f"where={text!r} is no source line\n  write  'model.py:120'  or  'model.py:100-140'"
        )
    first = int(match["first"] or 0)
    return match["file"], first, int(match["last"] or first), match["function"] or ""


# --- predicates ---------------------------------------------------------------------------------------


def _name_of_predicate(predicate: Any) -> str:
    return f"when:{predicate.__module__}:{getattr(predicate, '__qualname__', repr(predicate))}"


def _predicate(name: str) -> Predicate:
    found = _predicate_or_none(name)
    if found is None:
        raise PolicyError(f"the predicate {name.removeprefix('when:')} cannot be imported")
    return found


@cache
def _predicate_or_none(name: str) -> Predicate | None:
    module, _, qualified = name.removeprefix("when:").partition(":")
    try:
        value: Any = importlib.import_module(module)
        for part in qualified.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError):
        return None
    return value if callable(value) else None
