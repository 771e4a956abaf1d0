"""Numbers that were read from tensors pass for Python's own, and floats are computed as Python does it.

SymPy computes with real numbers: it would turn ``v * 0.1 * 0.3`` into ``v * 0.03`` and ``v - v`` into 0, and
find ``v == v`` true of a NaN.  So every float that is computed is a new symbol, defined by one operation of
Python's, and every decision on one is an outcome.  The environment of the symbols keeps both: definitions
become nodes of the graph where they are used, outcomes become guards.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx.experimental.sym_node import SymNode
from torch.utils._sympy.symbol import SymT, symbol_is_type

__all__ = [
    "Definition",
    "called",
    "is_float",
    "known_float",
    "needed",
    "number_of",
    "number_text",
    "python_numbers",
    "read_number",
]

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_NUMBERS = (bool, int, float, *_SYMBOLIC)
_DIVISIONS = (operator.truediv, operator.floordiv, operator.mod)
_COMPARISONS = {
    "__lt__": operator.lt,
    "__le__": operator.le,
    "__gt__": operator.gt,
    "__ge__": operator.ge,
    "__eq__": operator.eq,
    "__ne__": operator.ne,
}
_ARITHMETIC = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "pow": operator.pow,
}
_BITWISE = {
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
}
_ROUNDINGS: dict[str, Callable[..., Any]] = {
    "__int__": int,
    "__trunc__": math.trunc,
    "__floor__": math.floor,
    "__ceil__": math.ceil,
}


@dataclass(frozen=True)
class Definition:
    """How a number was computed.

    Attributes:
        function: An operator of Python's.
        operands: Plain numbers, and the expressions of symbolic ones.
        number: The result.
    """

    function: Callable[..., Any]
    operands: tuple[Any, ...]
    number: Any


def needed(
    symbols: Iterable[sympy.Basic], definitions: Mapping[sympy.Basic, Definition]
) -> list[sympy.Basic]:
    """Those of *symbols*, and of what they are computed from, that are defined, in order."""
    found: set[sympy.Basic] = set()
    todo = [symbol for symbol in symbols if symbol in definitions]
    while todo:
        symbol = todo.pop()
        if symbol not in found:
            found.add(symbol)
            operands = [o for o in definitions[symbol].operands if isinstance(o, sympy.Basic)]
            todo += [other for o in operands for other in o.free_symbols if other in definitions]
    return [symbol for symbol in definitions if symbol in found] if found else []


def called(function: Callable[..., Any], operands: list[str]) -> str:
    """A call of *function*, as text."""
    module = "" if function.__module__ == "builtins" else f"{function.__module__.removeprefix('_')}."
    return f"{module}{function.__name__}({', '.join(operands)})"


def number_text(value: Any) -> str:
    """*value* as an expression."""
    return f"float('{value!r}')" if isinstance(value, float) and not math.isfinite(value) else repr(value)


def is_float(symbol: sympy.Basic) -> bool:
    """Whether *symbol* stands for a floating point number."""
    return symbol_is_type(symbol, (SymT.FLOAT, SymT.UNBACKED_FLOAT))


def known_float(env: Any, value: float) -> Any:
    """A symbol of *env* for a number whose *value* is known."""
    from torch._dynamo.source import ConstantSource  # noqa: PLC0415  takes long to import
    from torch.fx.experimental.symbolic_shapes import DimDynamic  # noqa: PLC0415

    env.numbers += 1
    source = ConstantSource(f"number_{env.numbers}")
    symbol = env.create_unspecified_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    return torch.SymFloat(_FloatNode(symbol, env, float, value))


def number_of(symbol: sympy.Symbol, env: Any) -> Any:
    """The symbolic number that *symbol* of *env* stands for."""
    if is_float(symbol):
        return torch.SymFloat(_FloatNode(symbol, env, float, None))
    return torch.SymInt(SymNode(symbol, env, int, None))


def read_number(value: Any) -> Any:
    """A symbolic number, or those in a list, as Python sees it; anything else as it is."""
    if type(value) is list:
        return [read_number(item) for item in value]
    if type(value) is torch.SymFloat:
        return _ReadFloat(value.node)
    return _ReadInt(value.node) if type(value) is torch.SymInt else value


@contextmanager
def python_numbers() -> Iterator[None]:
    """What this thread reads from tensors passes for Python's own numbers."""
    here, cls = threading.get_ident(), torch.Tensor

    def reading(original: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        def read(self: torch.Tensor) -> Any:
            result = original(self)
            return read_number(result) if threading.get_ident() == here else result

        return read

    for name in ("item", "tolist"):
        setattr(cls, name, reading(getattr(torch._C.TensorBase, name)))
    try:
        yield
    finally:
        for name in ("item", "tolist"):
            delattr(cls, name)


# --- what is computed, and decided ----------------------------------------------------------------------


class _FloatNode(SymNode):
    """What torch's operators take for a float; a kernel that needs the number itself asks it."""

    def guard_float(self, file: str, line: int) -> float:
        return float(_outcome(float, _ReadFloat(self)))


def _is_symbolic(operand: Any) -> bool:
    return isinstance(operand, _SYMBOLIC)


def _is_float(operand: Any) -> bool:
    return isinstance(operand, (float, torch.SymFloat))


def _hint(operand: Any) -> Any:
    if not _is_symbolic(operand):
        return operand
    node = operand.node
    if not node.has_hint():
        raise node.shape_env._make_data_dependent_error(node.expr, node.expr)
    return node.hint


def _expression(operand: Any) -> Any:
    return operand.node.expr if _is_symbolic(operand) else operand


def _outcome(function: Callable[..., Any], number: Any, *others: Any) -> Any:
    """What *function* of *number* and *others* is now, which becomes a guard."""
    operands = (number, *others)
    outcome = function(*map(_hint, operands))
    number.node.shape_env.outcomes.append((function, tuple(map(_expression, operands)), outcome))
    return outcome


def _computed(function: Callable[..., Any], *operands: Any) -> Any:
    """The result of *function*, which is a float, as a new number."""
    env = next(operand.node.shape_env for operand in operands if _is_symbolic(operand))
    if function in _DIVISIONS and _is_symbolic(operands[1]):
        _outcome(bool, operands[1])
    if function is operator.pow:  # may be complex, or too large
        return function(*(_outcome(float, o) if _is_symbolic(o) else o for o in operands))
    if all(not _is_symbolic(operand) or operand.node.has_hint() for operand in operands):
        new = known_float(env, function(*map(_hint, operands)))
    else:
        new = env.create_unbacked_symfloat()
    env.definitions[new.node.expr] = Definition(function, tuple(map(_expression, operands)), new)
    return _ReadFloat(new.node)


class _ReadFloat(torch.SymFloat):
    """A float."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return float

    def __neg__(self) -> Any:
        return _computed(operator.neg, self)

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return _computed(operator.abs, self)

    def __bool__(self) -> bool:
        return bool(_outcome(bool, self))

    def __float__(self) -> float:
        return float(_outcome(float, self))

    def __round__(self, ndigits: Any = None) -> Any:
        return _outcome(round, self, ndigits)

    def __hash__(self) -> int:
        return hash(float(self))

    def __repr__(self) -> str:
        return repr(float(self))

    def __str__(self) -> str:
        return str(float(self))

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)

    def is_integer(self) -> bool:
        return float(self).is_integer()


class _ReadInt(torch.SymInt):
    """An int; SymPy computes with those as Python does."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return int

    def __pos__(self) -> Any:
        return self

    def __neg__(self) -> Any:
        return read_number(-_plain(self))

    def __abs__(self) -> Any:
        return self if self >= 0 else -self

    def __invert__(self) -> Any:
        return -self - 1

    def __round__(self, ndigits: Any = None) -> Any:
        return self if ndigits is None else round(int(self), ndigits)

    def __float__(self) -> float:
        return float(int(self))

    def __hash__(self) -> int:
        return hash(int(self))

    def __repr__(self) -> str:
        return repr(int(self))

    def __str__(self) -> str:
        return str(int(self))

    def __format__(self, spec: str) -> str:
        return format(int(self), spec)

    def __floor__(self) -> Any:
        return self

    __ceil__ = __trunc__ = __floor__

    def bit_length(self) -> int:
        return int(self).bit_length()


def _plain(operand: Any) -> Any:
    return torch.SymInt(operand.node) if type(operand) is _ReadInt else operand


def _float_operator(function: Callable[..., Any], *, reflected: bool) -> Callable[[Any, Any], Any]:
    def compute(self: Any, other: Any) -> Any:
        if not isinstance(other, _NUMBERS):
            return NotImplemented
        if type(other) not in _PLAIN:  # numpy's own numbers
            return function(other, float(self)) if reflected else function(float(self), other)
        return _computed(function, other, self) if reflected else _computed(function, self, other)

    return compute


def _int_operator(function: Callable[..., Any], *, reflected: bool) -> Callable[[Any, Any], Any]:
    def compute(self: Any, other: Any) -> Any:
        if not isinstance(other, _NUMBERS):
            return NotImplemented
        if type(other) not in _PLAIN:
            return function(other, int(self)) if reflected else function(int(self), other)
        operands = (other, self) if reflected else (self, other)
        if _is_float(other) or function is operator.truediv:
            return _computed(function, *operands)
        if function is operator.pow or function in _BITWISE.values():
            return function(*(int(o) if _is_symbolic(o) else o for o in operands))
        return read_number(function(*map(_plain, operands)))

    return compute


_PLAIN = frozenset({*_NUMBERS, _ReadFloat, _ReadInt})


def _comparison(function: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    def compare(self: Any, other: Any) -> Any:
        if not isinstance(other, _NUMBERS):
            return NotImplemented
        if _is_float(self) or _is_float(other):
            return _outcome(function, self, other)
        return bool(function(_plain(self), _plain(other)))

    return compare


def _rounding(function: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda self: _outcome(function, self)


for _name, _function in _ARITHMETIC.items():
    setattr(_ReadFloat, f"__{_name}__", _float_operator(_function, reflected=False))
    setattr(_ReadFloat, f"__r{_name}__", _float_operator(_function, reflected=True))
for _name, _function in (_ARITHMETIC | _BITWISE).items():
    setattr(_ReadInt, f"__{_name}__", _int_operator(_function, reflected=False))
    setattr(_ReadInt, f"__r{_name}__", _int_operator(_function, reflected=True))
for _name, _function in _COMPARISONS.items():
    setattr(_ReadFloat, _name, _comparison(_function))
    setattr(_ReadInt, _name, _comparison(_function))
for _name, _rounded in _ROUNDINGS.items():
    setattr(_ReadFloat, _name, _rounding(_rounded))
