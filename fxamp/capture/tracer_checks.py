"""Library functions that ask whether a tensor is a tracer's, and take another way if it is.

What a recording is to reproduce is the way that eager code takes, so these say no while one is made.  The
values that they then read are read from real tensors, as everywhere.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from fxamp.capture.replaced import replaced

__all__ = ["tracer_unseen"]

_CHECKS = (
    # module                           function            what the caller would do otherwise
    ("transformers.utils.import_utils", "is_fake_tensor", "builds a mask where eager attention is causal"),
)


@contextmanager
def tracer_unseen() -> Iterator[None]:
    """On this thread, fake tensors pass for real ones, as far as the functions of the table are asked."""
    with ExitStack() as stack:
        for module, name, _ in _CHECKS:
            attributes: dict[str, Any] | None = getattr(sys.modules.get(module), "__dict__", None)
            if attributes is not None and name in attributes:
                stack.enter_context(replaced(attributes, name, _denied_here(attributes[name])))
        yield


def _denied_here(original: Callable[..., object]) -> Callable[..., object]:
    here = threading.get_ident()

    def check(*args: object, **kwargs: object) -> object:
        return False if threading.get_ident() == here else original(*args, **kwargs)

    return check
