"""Run real code in the midst of a recording, in the state of the thread before the recording began.

A recording changes the thread: dispatch modes, the Python dispatcher, an autocast region, hooks on saved
tensors, stand-ins for sources of randomness.  The segments of a call are run for real while the model's
Python waits inside all of that, so it is all taken off for so long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch._dispatch.python import no_python_dispatcher
from torch.utils._python_dispatch import _disable_current_modes

from fxamp.capture.refused_states import saved_tensors_hooks

__all__ = ["Interlude"]


class Interlude:
    """The state of this thread now, to come back to.

    Attributes:
        suspend: Make contexts that take off what else the recording has put in place.
    """

    def __init__(self) -> None:
        self.suspend: list[Callable[[], AbstractContextManager[object]]] = []
        self._include = torch._C._dispatch_tls_local_include_set()
        self._exclude = torch._C._dispatch_tls_local_exclude_set()
        self._nesting = _autocast_nesting()
        self._grad = torch.is_grad_enabled()
        self._hooks = saved_tensors_hooks()

    @contextmanager
    def real(self) -> Iterator[None]:
        """Operators called inside run for real, outside of every region of the recording."""
        with ExitStack() as stack:
            stack.enter_context(_nesting_of(self._nesting))
            stack.enter_context(_disable_current_modes())
            stack.enter_context(torch.set_grad_enabled(self._grad))
            stack.enter_context(no_python_dispatcher())
            stack.enter_context(torch._C._ForceDispatchKeyGuard(self._include, self._exclude))
            stack.enter_context(self._hooks_as_before())
            for suspend in self.suspend:
                stack.enter_context(suspend())
            yield

    @contextmanager
    def _hooks_as_before(self) -> Iterator[None]:
        """The recording has pushed at most one pair of hooks on saved tensors."""
        now = saved_tensors_hooks()
        if now is None or now == self._hooks:
            yield
            return
        torch._C._autograd._pop_saved_tensors_default_hooks()
        try:
            yield
        finally:
            torch._C._autograd._push_saved_tensors_default_hooks(*now)


def _autocast_nesting() -> int:
    depth = int(torch.autocast_increment_nesting()) - 1
    torch.autocast_decrement_nesting()
    return depth


@contextmanager
def _nesting_of(depth: int) -> Iterator[None]:
    """As many autocast regions around as *depth*; the last one to end clears the casts that are kept."""
    regions = range(_autocast_nesting() - depth)
    for _ in regions:
        torch.autocast_decrement_nesting()
    try:
        yield
    finally:
        for _ in regions:
            torch.autocast_increment_nesting()
