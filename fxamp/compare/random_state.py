"""Random operators in two runs: the reference gets the same numbers.

An operator that thins out its input (dropout) is run from the same state of the generator by both.  What
draws numbers and nothing else (``randn``, ``normal_``, ``multinomial``) is not repeated, since another dtype
may draw others: the reference takes what the run has drawn.  So it does with memory that is not set
(``empty``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

__all__ = ["RandomState"]

_DRAWS = re.compile(
    r"(normal|uniform|bernoulli|random|exponential|geometric|log_normal|cauchy|multinomial|poisson|binomial"
    r"|rand|randn|randint|randperm)_?$|.*_like$"
)
_UNSET = re.compile(r"(new_)?empty(_like|_strided|_permuted)?$")  # memory as it was


@dataclass(frozen=True)
class RandomState:
    """What an operator has to do with random numbers.

    Attributes:
        seeded: Whether it draws any.
        draws: Whether that is all it does.
    """

    seeded: bool
    draws: bool
    _states: tuple[tuple[torch.Generator, torch.Tensor], ...] = ()

    @classmethod
    def of(cls, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RandomState:
        """The state of the generators before *func* is called."""
        name = func._schema.name.split("::")[-1]
        if _UNSET.match(name):
            return _DRAWN
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return _NONE
        if _DRAWS.match(name):
            return _DRAWN
        generators = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)]
        generators.append(torch.default_generator)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
        return cls(seeded=True, draws=False, _states=tuple((g, g.get_state()) for g in generators))

    def rewind(self) -> None:
        """Put the generators back."""
        for generator, state in self._states:
            generator.set_state(state)


_NONE = RandomState(seeded=False, draws=False)
_DRAWN = RandomState(seeded=True, draws=True)
