"""Why calls run eagerly, by signature, or by family where too many of one kind were captured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fxamp.capture.mirror import ChangedModelError
from fxamp.errors import CaptureError
from fxamp.runtime.eager_use import UsedOutsideError
from fxamp.runtime.recapture import ALL_FAMILIES, family_of, is_limit

__all__ = ["Failure", "Failures"]


@dataclass(frozen=True)
class Failure:
    """Why calls of a signature are not captured.

    Attributes:
        reason: For people.
        whole: Whether the module must run as it is, since Dynamo, which it uses, does not know shadows.
        passing: Whether another try may succeed: the call did to the model what a first call does.
        shared: Whether there is a graph, which is not run beside eager code that uses its weights too.
    """

    reason: str
    whole: bool = False
    passing: bool = False
    shared: bool = False

    @classmethod
    def of(cls, error: CaptureError) -> Failure:
        """What *error*, which a capture raised, says of calls like this one."""
        return cls(
            str(error),
            whole=_is_from_dynamo(error),
            passing=isinstance(error, ChangedModelError),
            shared=isinstance(error, UsedOutsideError),
        )


class Failures(dict[Any, Failure]):
    """The failures of one module.

    Attributes:
        called: The signatures that calls ran eagerly with.
        forgiven: Those that were given a second try.
    """

    def __init__(self) -> None:
        super().__init__()
        self.called: set[Any] = set()
        self.forgiven: set[Any] = set()

    def scope_of(self, key: Any) -> Any:
        """Under which key the failure of a call is kept: its own, or one for all of its kind."""
        if key in self or not any(map(is_limit, self)):
            return key
        family = family_of(key)
        return family if family in self else ALL_FAMILIES if ALL_FAMILIES in self else key

    def has(self, key: Any) -> bool:
        """Whether calls with the signature *key* run eagerly."""
        return self.scope_of(key) in self

    def forgive(self, key: Any) -> None:
        """Let a call be captured, once it has run, that could not be because it set attributes; once."""
        failure = self.get(key)
        if failure is not None and failure.passing and key in self.called - self.forgiven:
            self.forgiven.add(key)
            del self[key]

    def lift_limits(self) -> None:
        """Drop those that stand for too many captures."""
        for key in list(filter(is_limit, self)):
            del self[key]


def _is_from_dynamo(error: BaseException | None) -> bool:
    while error is not None:
        if type(error).__module__.startswith("torch._dynamo"):
            return True
        error = error.__cause__ or error.__context__  # a refusal within Dynamo, which it gave another form
    return False
