"""Record what runs under ``torch.utils.checkpoint`` as a block, so that the program checkpoints it too.

Both kinds are taken where ``checkpoint`` itself hands over: the kind without reentrance drives a generator
around the function; the reentrant kind is an ``autograd.Function`` that runs it without gradients and again,
with gradients and on detached inputs, in the backward pass.  So that one is recorded twice.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

from fxamp.capture.recorder import Recorder
from fxamp.capture.replaced import replaced
from fxamp.errors import CaptureError

__all__ = ["checkpoints_recorded"]

_GENERATORS = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
_OPTIONS = (
    "preserve_rng_state",
    "context_fn",
    "determinism_check",
    "debug",
    "early_stop",
    "respect_saved_tensors_hooks",
)


@contextmanager
def checkpoints_recorded(recorder: Recorder) -> Iterator[None]:
    """Checkpoints of this thread become blocks of *recorder*'s graph."""
    names: dict[str, Any] = vars(torch_checkpoint)
    here = threading.get_ident()
    with ExitStack() as stack:
        for name in _GENERATORS:
            if name in names:
                stack.enter_context(replaced(names, name, _generator(recorder, names[name], here)))
        function = names["CheckpointFunction"]
        stack.enter_context(replaced(names, "CheckpointFunction", _Reentrant(recorder, function, here)))
        yield


def _generator(recorder: Recorder, original: Callable[..., Any], here: int) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def generator(*given: Any, **named: Any) -> Iterator[None]:
        if threading.get_ident() != here or not recorder.is_open:
            yield from original(*given, **named)
            return
        if not torch.is_grad_enabled():
            yield
            return
        call = signature.bind(*given, **named).arguments
        options = {name: call[name] for name in _OPTIONS if name in call}
        recorder.enter_block()
        try:
            yield
        except BaseException:
            recorder.refuse(CaptureError("an exception leaves a checkpointed function"))
            recorder.abandon_block()
            raise
        block = recorder.leave_block(None)
        options["use_reentrant"] = False
        recorder.add_blocks(block, block, options, _tensors(call.get("args", ())), block.outputs)

    return generator


def _tensors(args: Any) -> list[torch.Tensor]:
    return [arg for arg in args if isinstance(arg, torch.Tensor)]


class _Reentrant:
    """Stands for ``CheckpointFunction``."""

    def __init__(self, recorder: Recorder, original: Any, here: int) -> None:
        self._recorder, self._original, self._here = recorder, original, here

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def apply(self, function: Callable[..., Any], preserve: bool, *args: Any) -> Any:  # noqa: FBT001
        """What ``CheckpointFunction.apply`` does."""
        if threading.get_ident() != self._here or not self._recorder.is_open:
            return self._original.apply(function, preserve, *args)
        if not torch.is_grad_enabled():
            return function(*args)
        recorder = self._recorder
        recorder.enter_block()
        with torch.no_grad():
            result = function(*args)
        parts = result if isinstance(result, tuple) else (result,)
        first = recorder.leave_block(_tensors(parts))
        again = self._again(function, args)
        options = {"use_reentrant": True, "preserve_rng_state": preserve}
        given = _tensors(args)
        outputs = recorder.like_results(first.outputs, needs_grad=any(arg.requires_grad for arg in given))
        recorder.add_blocks(first, again, options, given, outputs)
        fresh = iter(outputs)
        renewed = tuple(next(fresh) if isinstance(part, torch.Tensor) else part for part in parts)
        return renewed if isinstance(result, tuple) else renewed[0]

    def _again(self, function: Callable[..., Any], args: Any) -> Any:
        recorder = self._recorder
        given = _tensors(args)
        detached = recorder.detached(given)
        fresh = iter(detached)
        inputs = [next(fresh) if isinstance(arg, torch.Tensor) else arg for arg in args]
        recorder.enter_block(zip(detached, given, strict=True))
        with torch.enable_grad():
            result = function(*inputs)
        return recorder.leave_block(_tensors(result if isinstance(result, tuple) else (result,)))
