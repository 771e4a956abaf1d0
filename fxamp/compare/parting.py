"""Where two runs first part: the first operator of one whose result its like never had in the other.

Results are kept as digests, so nothing is held.  Casts are left out: one run has them as operators, the other
inside of operators.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload

from fxamp.capture.locks import pre_dispatch_lock
from fxamp.capture.recording_mode import RecordingMode
from fxamp.compare.shadows import tensors_in
from fxamp.compare.sites import Site, Sites

__all__ = ["Step", "first_difference", "steps_of"]

_CASTS = ("aten::to.", "aten::_to_copy")

Step = tuple[Site, str]
"""An operator, and the digest of its results."""


def steps_of(model: object, run: Callable[[], Any]) -> list[Step]:
    """The operators of a run, in order."""
    sites, steps = Sites(model), list[Step]()

    def record(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch._C._DisablePythonDispatcher():
            result = func(*args, **kwargs)
            results = [tensor for tensor in tensors_in(result) if tensor.is_floating_point()]
            if results and not func.name().startswith(_CASTS):
                steps.append((sites.now(func.name()), _digest(results)))
        return result

    with pre_dispatch_lock, enable_python_dispatcher(), RecordingMode(record):
        run()
    return steps


def first_difference(run: list[Step], expected: list[Step]) -> Site | None:
    """The first operator of *run* whose result is not among those that its like had in *expected*."""
    left = Counter((site.op, digest) for site, digest in expected)
    known = {site.op for site, _ in expected}
    for site, digest in run:
        if site.op not in known:
            continue  # a part of what is one operator in the other run
        if not left[site.op, digest]:
            return site
        left[site.op, digest] -= 1
    return None


def _digest(tensors: list[torch.Tensor]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
        found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(dense.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
