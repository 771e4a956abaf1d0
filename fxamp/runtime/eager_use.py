"""Which eager pieces use which parameters, and which programs may therefore not run.

Eager autocast keeps one cast of a float32 parameter for the length of a region, and all gradients of it
meet in that cast.  Programs share theirs through the cast scope, but eager code has another.  So a program
may keep a cast of a parameter only if no eager code outside of its module uses that parameter.

Who uses what is seen when eager code runs.  To know it before a program runs beside it, the first call of
each signature that cannot be captured is a survey: its capturable children are captured, but run eagerly
this once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fxamp.errors import CaptureError
from fxamp.runtime.shadow import shadow_of

__all__ = ["EagerUse", "Onlooker", "UsedOutsideError"]


class UsedOutsideError(CaptureError):
    """A program may not run, since eager code outside of its module uses weights that it casts."""

    def __init__(self) -> None:
        super().__init__("eager code outside of this module uses its weights too")


class EagerUse:
    """What is known of one converted model."""

    def __init__(self) -> None:
        self._users: dict[int, set[str]] = {}
        self._thread = threading.local()

    def note(self, parameter: nn.Parameter, path: str) -> None:
        """The Python of the module at *path* uses *parameter*."""
        self._users.setdefault(id(parameter), set()).add(path)

    def is_inside(self, parameters: Iterable[int], path: str) -> bool:
        """Whether all known users of *parameters* (by ``id``) are the module at *path* and those below it."""
        below = f"{path}."
        return all(
            user == path or user.startswith(below) or not path
            for parameter in parameters
            for user in self._users.get(parameter, ())
        )

    def used_by(self, paths: set[str]) -> set[int]:
        """The parameters, by ``id``, that the Python of the modules at *paths* uses."""
        return {parameter for parameter, users in self._users.items() if users & paths}

    @property
    def surveying(self) -> bool:
        """Whether this thread is inside a survey."""
        return getattr(self._thread, "surveys", 0) > 0

    @contextmanager
    def survey(self) -> Iterator[None]:
        """Programs do not run inside, on this thread."""
        self._thread.surveys = getattr(self._thread, "surveys", 0) + 1
        try:
            yield
        finally:
            self._thread.surveys -= 1


class Onlooker:
    """Runs the module at *path* by its own Python, children included, and notes the parameters it uses."""

    def __init__(self, use: EagerUse, path: str) -> None:
        self._use, self._path = use, path

    def call_child(self, child: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run *child* likewise."""
        below = Onlooker(self._use, f"{self._path}.{path}" if self._path else path)
        return shadow_of(child, below)(*args, **kwargs)

    def read_parameter(self, parameter: nn.Parameter) -> None:
        """Note it."""
        self._use.note(parameter, self._path)
