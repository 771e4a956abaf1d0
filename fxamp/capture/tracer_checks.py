"""Library functions that ask whether a tensor is a tracer's, and take another way if it is.

What a recording is to reproduce is the way that eager code takes, so these say no while one is made.  The
values that they then read are read from real tensors, as everywhere.

An artifact cannot read values.  So a model that reads some is recorded once more for it with
``exporter_seen``, under which libraries take the way that they have for exporters.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from fxamp.capture.replaced import replaced

__all__ = ["exporter_seen", "tracer_unseen"]

_CHECKS = (
    # module                           function            what the caller would do otherwise
    ("transformers.utils.import_utils", "is_fake_tensor", "builds a mask where eager attention is causal"),
)


@contextmanager
def tracer_unseen() -> Iterator[None]:
    """On this thread, fake tensors pass for real ones, as far as the functions of the table are asked.

    But not inside of :func:`exporter_seen`.
    """
    if torch.compiler.is_exporting():
        yield
        return
    with ExitStack() as stack:
        for module, name, _ in _CHECKS:
            attributes: dict[str, Any] | None = getattr(sys.modules.get(module), "__dict__", None)
            if attributes is not None and name in attributes:
                stack.enter_context(replaced(attributes, name, _denied_here(attributes[name])))
        yield


@contextmanager
def exporter_seen() -> Iterator[None]:
    """Models see what ``torch.export`` lets them see: ``torch.compiler.is_exporting()``, fake tensors."""
    names = vars(torch.compiler)
    with replaced(names, "_is_exporting_flag", True), replaced(names, "_is_compiling_flag", True):  # noqa: FBT003
        yield


def _denied_here(original: Callable[..., object]) -> Callable[..., object]:
    here = threading.get_ident()

    def check(*args: object, **kwargs: object) -> object:
        return False if threading.get_ident() == here else original(*args, **kwargs)

    return check
