"""Where an operator is called: what the selectors of overrides are asked about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import CodeType

from torch._ops import OpOverload

from fxamp.ir.facts import Fact
from fxamp.ir.where import Where

__all__ = ["Site"]


@dataclass(frozen=True)
class Site:
    """One call of an operator, as a predicate sees it.

    Attributes:
        operator: What is called.
        where: The innermost module's path and the source line.
        modules: The paths of the modules that are being called, outermost (``""``) first.
        inputs: dtype, shape, device and place in the gradient of its tensor arguments.
        scopes: Which overrides of the policy, by their place in it, select one of the modules.
        codes: The Python functions that are being called.
    """

    operator: OpOverload
    where: Where
    modules: tuple[str, ...] = ("",)
    inputs: tuple[Fact, ...] = ()
    scopes: frozenset[int] = frozenset()
    codes: Sequence[CodeType] = field(default=(), repr=False)

    @property
    def op(self) -> str:
        """The overload's name: ``aten::softmax.int``."""
        return str(self.operator.name())
